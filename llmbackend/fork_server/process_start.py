"""When a process was started: its age, and whether a process id still belongs to the same process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_IMPORTED_S = time.perf_counter()
_START_TIME: Final = 19
"""Field of /proc/<pid>/stat, counted from behind the process's name."""


def started_ticks(pid: int) -> int:
    """When the process was started, in the system's clock ticks since boot; 0 = there is none, or no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[_START_TIME])
    except (OSError, IndexError, ValueError):
        return 0


def process_age_s() -> float:
    """Of this process; without /proc, since this module was imported."""
    if ticks := started_ticks(os.getpid()):
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - _IMPORTED_S
