"""Whether an error says that the machine lacks something, and not that an engine is broken.

For: the supervisor, which does not count such errors against an engine, and the transport. Does not know: engines.
Source: errno of open, fork, socket and mmap; the interpreter's text for a thread that could not be started.
"""

from __future__ import annotations

import errno
import os
from typing import Final

_ERRNOS: Final = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.ENOBUFS,
        errno.ENOSPC,
        errno.EDQUOT,
    }
)
_NO_THREAD: Final = "can't start new thread"


def is_shortage(error: BaseException) -> bool:
    """Too few descriptors, processes, threads, or too little memory or disk. ZMQError has an errno, too."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return True
    return getattr(error, "errno", None) in _ERRNOS


def require_descriptors(count: int) -> None:
    """Raises OSError when this process can not open `count` more. libzmq aborts the process where some of its own calls
    find none, so there must be enough before it is asked."""
    opened: list[int] = []
    try:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        while len(opened) < count:
            opened.append(os.dup(opened[0]))
    finally:
        for descriptor in opened:
            os.close(descriptor)
