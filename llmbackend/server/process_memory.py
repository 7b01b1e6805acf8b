"""Memory usage of processes, and a process's children.

Used by servers and benchmarks. Depends only on the standard library, because benchmarks use it in other engines'
environments.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path


def pss_mb(pid: int | None = None) -> float:
    """The memory of one process, by default this one. Raises OSError on systems that do not report it."""
    text = Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text()
    return int(text.partition("\nPss:")[2].split()[0]) * 1024 / 1e6


def peak_rss_mb() -> float:
    """Peak memory of this process since its exec."""
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/self/status").read_text()
        return int(text.partition("\nVmHWM:")[2].split()[0]) * 1024 / 1e6
    # On Linux this could be the parent's peak.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def descendants(pid: int | None = None) -> list[int]:
    """The process's children, recursively; [] on systems that do not report them."""
    found: list[int] = []
    waiting = [pid or os.getpid()]
    while waiting:
        for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                children = [int(child) for child in path.read_text().split()]
                found += children
                waiting += children
    return found


def tree_pss_mb(pid: int | None = None) -> dict[int, float]:
    """The memory of a process and its descendants by process id; {} on systems that do not report it."""
    sizes_mb: dict[int, float] = {}
    for each in (pid or os.getpid(), *descendants(pid)):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            sizes_mb[each] = pss_mb(each)
    return sizes_mb
