"""Temporary folders that live as long as their process; those of killed processes are removed by a later one (needs
/proc)."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from .process_start import started_ticks

_OWNER: Final = ".owner"
_PREFIX: Final = "llmbackend-"


class OwnedFolder:
    """Accessible to this user only. Removed by `remove`, or when the interpreter exits."""

    def __init__(self, kind: str) -> None:
        """kind: part of its name. Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # the disk is full: then only this process can remove it
            new = self.path / f"{_OWNER}.new"
            new.write_text(_identity(os.getpid()))
            new.rename(self.path / _OWNER)  # complete whenever it is read


def remove_abandoned() -> None:
    """Removes this user's folders whose owner has ended without removing them."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):  # another user's, or removed meanwhile
            if owner.lstat().st_uid == os.getuid() and _has_ended(owner.read_text()):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _has_ended(identity: str) -> bool:
    """False also for a process of another PID namespace, which is invisible here."""
    namespace, pid, _ = identity.split()
    return namespace == _namespace() != "" and _identity(int(pid)) != identity


def _identity(pid: int) -> str:
    """Of the process that has this id now; differs from that of any earlier process with the same id."""
    return f"{_namespace() or '-'} {pid} {started_ticks(pid)}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
