"""Resources of any process: temporary folders that are removed with it, its age, freed memory, out-of-memory kills."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

_OWNER: Final = ".owner"
_PREFIX: Final = "llmbackend-"


class OwnedFolder:
    """A temporary folder accessible only to this user. Removed by `remove`, or when the interpreter exits."""

    def __init__(self, kind: str) -> None:
        """kind: a part of its name. Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # if the disk is full, only this process removes it
            new = self.path / f"{_OWNER}.new"
            new.write_text(_identity(os.getpid()))
            new.rename(self.path / _OWNER)  # so that readers never see an incomplete file


def remove_abandoned() -> None:
    """Removes this user's folders left behind by processes that have ended."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):  # owned by another user, or removed meanwhile
            if owner.lstat().st_uid == os.getuid() and _has_ended(owner.read_text()):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _has_ended(identity: str) -> bool:
    """False also for processes in other PID namespaces, which are invisible here."""
    namespace, pid, _ = identity.split()
    return namespace == _namespace() != "" and _identity(int(pid)) != identity


def _identity(pid: int) -> str:
    """Differs from that of any earlier process with the same id."""
    return f"{_namespace() or '-'} {pid} {started_ticks(pid)}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


_IMPORTED_S = time.perf_counter()
_START_TIME: Final = 19
"""Index among the fields of /proc/<pid>/stat after the process's name."""


def started_ticks(pid: int) -> int:
    """Start of the process in clock ticks since boot; 0 = no such process, or no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[_START_TIME])
    except (OSError, IndexError, ValueError):
        return 0


def process_age_s() -> float:
    """Age of this process; without /proc, time since this module was imported."""
    if ticks := started_ticks(os.getpid()):
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - _IMPORTED_S


def num_ended_for_memory() -> int:
    """Processes that the kernel has killed since boot because memory ran out; 0 if it does not count them."""
    try:
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        return 0


# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Makes glibc, if the process uses it, keep large freed buffers for the next allocation.

    By default, freed buffers above 32 MiB, such as a step's logits, are returned to the kernel, and the next one costs
    a page fault per 4 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Returns memory to the kernel after work that freed a lot. Takes a few milliseconds."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
