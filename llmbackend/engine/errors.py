"""The engine's exceptions, one tree; the adapter makes TritonErrors (core/errors.py) of them.

Exception
├── ProgramUnsupportedError     the model must run as modules; nothing is wrong with it
├── RuntimeError
│   ├── DeviceLostError         an accelerator that no call of this process can use any more
│   └── EngineDeadError         an engine process or thread was lost
└── ValueError                  an engine argument that cannot be served
    ├── BadInputError           a request's fields cannot be served together, or not by this model
    ├── CheckpointError         `model`: the files are broken or do not fit config.json
    └── UnshardableError        `tensor_parallel_size`, `pipeline_parallel_size`: the model cannot be split so
"""

from __future__ import annotations

import errno
from typing import Final, Literal

_SHORTAGES: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
)
_NO_THREAD: Final = "can't start new thread"
"""The interpreter's text."""

LOST_RANK_EXIT_CODE: Final = 70
"""The exit code of an engine's process that lost another rank. The last line of its output says which."""

DeathKind = Literal[
    "exit", "signal", "killed", "memory", "hang", "message", "load", "thread", "loop", "shortage", "disconnect"
]
"""How an engine was lost; a label of the restart metric. killed: SIGKILL; memory: SIGKILL, by the kernel, when memory
ran out; signal: any other signal; shortage: it could not be started because the machine lacked descriptors, memory or
processes; disconnect: the link to an engine elsewhere has ended, or could not be made."""


class EngineDeadError(RuntimeError):
    """The engine can no longer be used. The message is fit for clients; `details` is for the log."""

    def __init__(self, message: str, kind: DeathKind, details: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


class DeviceLostError(RuntimeError):
    """The engine's process has to end: another one gets the device back."""


class BadInputError(ValueError):
    """What is wrong with a request, for its client: names the fields."""


class CheckpointError(ValueError):
    """What is wrong with a checkpoint's files, in one line."""


class UnshardableError(ValueError):
    """Why a model cannot be split among that many ranks; the text is for the user."""


class ProgramUnsupportedError(Exception):
    """Why a model cannot run as a program. It runs as its modules instead."""


def is_shortage(error: BaseException) -> bool:
    """Whether the machine lacks descriptors, processes, threads, memory or disk, so that the engine is not to blame.
    ZMQError also has an errno."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return True
    return getattr(error, "errno", None) in _SHORTAGES
