"""Temporary folders that live as long as their process; those of a process that was killed are removed by a later one.

For: the server process, and what it starts. Does not know: what is in a folder. Invariants: each folder has a file that
says which process it belongs to; a folder is removed by that process, or when that process has ended. Where the system
does not tell about processes (no /proc), folders of killed processes stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from llmbackend.fork_server.process_start import started_ticks

_OWNER: Final = ".owner"
_PREFIX: Final = "llmbackend-"


class OwnedFolder:
    """Only this user may enter it. Removed by `remove`, or when the interpreter ends."""

    def __init__(self, kind: str) -> None:
        """kind: a word of its name. Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # the disk is full: nobody but this process will remove it
            new = self.path / f"{_OWNER}.new"
            new.write_text(_identity(os.getpid()))
            new.rename(self.path / _OWNER)  # whole when anybody reads it


def remove_abandoned() -> None:
    """Removes the folders of this user whose process has ended without removing them."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):  # of another user, or removed meanwhile
            if owner.lstat().st_uid == os.getuid() and _has_ended(owner.read_text()):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _has_ended(identity: str) -> bool:
    """False also for a process of another container, which cannot be seen from here."""
    namespace, pid, _ = identity.split()
    return namespace == _namespace() != "" and _identity(int(pid)) != identity


def _identity(pid: int) -> str:
    """Of the process that has this number now."""
    return f"{_namespace() or '-'} {pid} {started_ticks(pid)}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
