"""How long this process has existed.

For: what a start says about itself. Does not know: what was started. Invariant: where the system tells, imports before
this one count.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED_S = time.perf_counter()


def process_age_s() -> float:
    """Linux tells; elsewhere, since this module was imported."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.perf_counter() - _IMPORTED_S
