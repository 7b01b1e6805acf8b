"""`python -m tests.conformance [NUMBER ...]`: replays the golden transcripts of a real Triton against this host.

Prints each difference and `conformance: N of M transcripts match`; exits 1 when a difference is not listed in
by_design.toml. With numbers, only those transcripts are compared; what was recorded before them on the same server is
replayed, too, since their answers depend on it.
"""

from __future__ import annotations

import sys

from .replayer.report import print_report
from .replayer.run import replay_all

if __name__ == "__main__":
    sys.exit(print_report(replay_all(only=sys.argv[1:]), partial=bool(sys.argv[1:])))
