"""Runs the test suite, then the failed tests alone; those that then pass are reported as flaky.

Part of `make unit`. Other users of a machine may delay a test for longer than it waits. Invariant: no failure is
silently ignored: flaky tests are counted and printed, and a test that is flaky twice in the last runs fails the suite.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HISTORY: Final = Path(".cache/flaky_tests.json")
"""Flaky tests of the last runs in this checkout, the newest last. A fresh checkout, as in CI, has none."""
MAX_RUNS: Final = 20
_LAST_FAILED: Final = Path(".pytest_cache/v/cache/lastfailed")
_SOME_FAILED: Final = 1
# Three workers for two cores, because many tests wait; the tests of a file run in one worker, because they share
# servers, in the order of tests/conftest.py.
_SUITE: Final = ("--numprocesses", "3", "--dist", "loadfile", "--no-loadscope-reorder")
_AGAIN: Final = ("--last-failed", "--last-failed-no-failures", "none", "--exitfirst")


def main(arguments: Sequence[str]) -> int:
    """pytest's exit status; 1 also for a test that was flaky twice. arguments: of pytest, for both runs."""
    _LAST_FAILED.unlink(missing_ok=True)
    status = _pytest(*_SUITE, *arguments)
    if status != _SOME_FAILED:
        if not status:
            record([])
        return status
    failed = sorted(json.loads(_LAST_FAILED.read_text()))
    status = _pytest(*_AGAIN, *arguments)
    if status:
        return status
    again = record(failed)
    print(f"\n{len(failed)} flaky: failed in the suite, passed alone (mend them):", *failed, sep="\n  ")
    if again:
        print(f"flaky for the second time in the last {MAX_RUNS} runs ({HISTORY}):", *again, sep="\n  ")
    return _SOME_FAILED if again else 0


def record(flaky: Sequence[str]) -> list[str]:
    """Adds a run to the history; returns those of `flaky` that were flaky in an earlier run, too."""
    runs: list[list[str]] = json.loads(HISTORY.read_text()) if HISTORY.exists() else []
    runs = [*runs, list(flaky)][-MAX_RUNS:]
    HISTORY.parent.mkdir(exist_ok=True)
    HISTORY.write_text(json.dumps(runs, indent=1))
    counts = Counter(test for run in runs for test in run)
    return [test for test in flaky if counts[test] > 1]


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
