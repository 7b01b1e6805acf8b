"""Temporary folders that live as long as their process; those of a process that was killed are removed by a later one.

For: the server process, and what it starts. Does not know: what is in a folder. Invariants: each folder has a file that
its process keeps locked, and the kernel unlocks it when the process ends, however it ends; a folder is removed only by
its process, or when its lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

_LOCK: Final = ".owner"
_PREFIX: Final = "llmbackend-"


class OwnedFolder:
    """Only this user may enter it. Removed by `remove`, or when the interpreter ends."""

    def __init__(self, kind: str) -> None:
        """kind: a word of its name. Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
        new = self.path / f"{_LOCK}.new"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # locked before anybody looks for it
        self.remove = weakref.finalize(self, _remove, self.path, descriptor)


def remove_abandoned() -> None:
    """Removes the folders of this user whose process has ended without removing them."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # of another user, removed meanwhile, or in use
            if lock.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
