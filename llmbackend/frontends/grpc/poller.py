"""The thread that grpc.aio waits on for its operations: how the system schedules it.

For: the gRPC server. Does not know: servers, calls. Invariant: where the thread or the policy is not there, nothing
changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

_TARGET: Final = "_poll_wrapper"
"""What grpc.aio's thread runs, which is part of the thread's name."""


def yield_to_event_loop() -> None:
    """Lets grpc.aio's polling thread wait until others of its core sleep or have had their share (SCHED_BATCH).

    Each write that ends wakes it. With the usual policy it takes the core from the event loop after each message that
    the loop writes, which costs both a change of threads per message; so it handles all messages of a step together (of
    64 streams: 33 µs of CPU per message instead of 44). After a grpc.aio server was made, which starts the thread.
    """
    for thread in threading.enumerate():
        if _TARGET in thread.name and thread.native_id is not None:
            with contextlib.suppress(AttributeError, OSError):
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
