"""What binds a process to the one that made it: it ends with it, and leaves signals to it.

For: the template and the stubs that it forks. Does not know: what they do. Invariants: the kernel kills a process with
the thread that made it, also while it can not run Python code; SIGINT and SIGTERM, which go to a whole group, are the
host's to act on, as in Triton, and are ignored by handlers, which a program that a model starts does not inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_HOST_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_with(parent_pid: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on this system: then the end of file must do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it was gone before


def ignore_signals() -> None:
    for number in _HOST_SIGNALS:
        signal.signal(number, lambda *_: None)


def give_signals_back() -> None:
    """In a process that a model forks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
