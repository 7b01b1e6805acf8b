"""The engine's exceptions, as one tree; the adapter translates them into TritonErrors (core/errors.py).

Exception
├── ProgramUnsupportedError     the model must run as modules; not a failure
├── RuntimeError
│   ├── DeviceLostError         an accelerator that this process can no longer use
│   └── EngineDeadError         an engine process or thread was lost
└── ValueError                  an engine argument that cannot be honoured
    ├── BadInputError           a request's fields conflict, or the model does not support them
    ├── CheckpointError         `model`: the files are broken or do not match config.json
    └── UnshardableError        `tensor_parallel_size`, `pipeline_parallel_size`: the model cannot be split that way
"""

from __future__ import annotations

import errno
from typing import Final, Literal

_SHORTAGES: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
)
_NO_THREAD: Final = "can't start new thread"
"""CPython's message."""

LOST_RANK_EXIT_CODE: Final = 70
"""Exit code of an engine process that lost another rank. The last line of its output says which."""

DeathKind = Literal[
    "exit", "signal", "killed", "memory", "hang", "message", "load", "thread", "loop", "shortage", "disconnect"
]
"""How an engine was lost; a label of the restart metric. killed: SIGKILL; memory: SIGKILL by the kernel's OOM killer;
signal: any other signal; shortage: the machine had too few descriptors, processes or too little memory to start it;
disconnect: the link to a remote engine ended or could not be made."""


class EngineDeadError(RuntimeError):
    """The engine can no longer be used. The message is fit for clients; `details` is for the log."""

    def __init__(self, message: str, kind: DeathKind, details: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


class DeviceLostError(RuntimeError):
    """The engine's process must exit; a new one can use the device again."""


class BadInputError(ValueError):
    """What is wrong with a request, for its client; names the fields."""


class CheckpointError(ValueError):
    """What is wrong with a checkpoint's files, in one line."""


class UnshardableError(ValueError):
    """Why a model cannot be split among that many ranks; the message is for the user."""


class ProgramUnsupportedError(Exception):
    """Why a model cannot run as a program; it runs as modules instead."""


def is_shortage(error: BaseException) -> bool:
    """Whether the machine lacks descriptors, processes, threads, memory or disk, so the engine is not at fault.
    ZMQError also has an errno."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return True
    return getattr(error, "errno", None) in _SHORTAGES
