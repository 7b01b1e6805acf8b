"""Resources of any process: temporary folders that are removed with it, its age, freed memory, out-of-memory kills."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

_LOCKED: Final = ".locked"
_OWNER: Final = ".owner"
"""In folders of earlier releases, instead of a lock."""
_PREFIX: Final = "llmbackend-"


class OwnedFolder:
    """A temporary folder accessible only to this user. Removed by `remove`, or when the interpreter exits.

    A lock on it tells other processes, also those in other containers, that it is in use; systemd-tmpfiles does not
    remove locked folders.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        """kind: a part of its name. parent: None = the system's folder for temporary files. Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(kind, parent), dir=parent))
        try:
            descriptor = _opened(self.path)
        except OSError:
            self.path.rmdir()
            raise
        self.remove = weakref.finalize(self, _remove, self.path, descriptor)
        with contextlib.suppress(OSError):  # without locks, or with a full disk, only this process removes it
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            (self.path / _LOCKED).touch()


def _prefix(kind: str, parent: Path | None) -> str:
    return f"{_PREFIX}{kind}-" if parent is None else f"{kind}-"  # a short name leaves room for those of sockets


def remove_abandoned(kind: str = "*", parent: Path | None = None) -> None:
    """Removes this user's folders left behind by processes that have ended."""
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{_prefix(kind, parent)}*"):
        with contextlib.suppress(OSError, ValueError):  # another user's, in use, or removed meanwhile
            if folder.lstat().st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Raises OSError or ValueError if it is in use, or not an OwnedFolder."""
    descriptor = _opened(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / _LOCKED).exists() or _has_ended((folder / _OWNER).read_text()):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


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
