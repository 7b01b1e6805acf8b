"""How much memory processes have, each page divided by the number of processes that share it (PSS).

For: the server process, benchmarks. Does not know: what the processes are; only the standard library is imported.
Invariant: the processes of a tree are read one directly after another, so that what they share is counted once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path


def pss_mb(pid: int | None = None) -> float:
    """Of one process, by default this one. Raises OSError where the system does not tell."""
    text = Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text()
    return int(text.partition("\nPss:")[2].split()[0]) * 1024 / 1e6


def peak_rss_mb() -> float:
    """The most that this process has had in memory since it began to run its program."""
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/self/status").read_text()
        return int(text.partition("\nVmHWM:")[2].split()[0]) * 1024 / 1e6
    # Not on Linux, where this is the parent's peak if that was higher.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def give_back_freed() -> None:
    """Returns to the system what the start has freed, tens of megabytes behind a large tokenizer; where the C library
    can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def descendants(pid: int | None = None) -> list[int]:
    """A process's children and their children; [] where the system does not say."""
    found: list[int] = []
    waiting = [pid or os.getpid()]
    while waiting:
        for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # ended meanwhile
                children = [int(child) for child in path.read_text().split()]
                found += children
                waiting += children
    return found


def tree_pss_mb(pid: int | None = None) -> dict[int, float]:
    """Of a process and its descendants, by process id; {} where the system does not tell."""
    sizes_mb: dict[int, float] = {}
    for each in (pid or os.getpid(), *descendants(pid)):
        with contextlib.suppress(OSError, IndexError):  # ended meanwhile
            sizes_mb[each] = pss_mb(each)
    return sizes_mb
