"""One request's way back through pb_utils, and the watch over requests that their clients may give up.

For: requests.py and chores.py. Does not know: tensors, the adapter. Invariants: nothing is sent after FINAL; pb_utils
is not asked about a request once its FINAL is on its way, because Triton's side of it may be gone then (the stub asks
it by address). Source: python_backend's response_sender.cc and pb_cancel.cc.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils

from llmbackend.core.backend_api import ResponseFlag

logger = logging.getLogger(__name__)


class Channel:
    """A response sender that several threads use. `_lock` owns it: a send and a question about it never overlap."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._is_final = False

    def send(self, response: Any | None, flags: ResponseFlag) -> None:
        """Blocks until Triton has taken it (the stub waits for its parent process). Raises what pb_utils raises, but
        for the last response: nobody could do more about that one than log it."""
        is_final = bool(flags & ResponseFlag.FINAL)
        with self._lock:
            if self._is_final:
                logger.error("a response after the final one is dropped")
                return
            self._is_final = is_final
            try:
                self._pass_on(response, is_final)
            except Exception:
                if not is_final:
                    raise
                logger.exception("Triton did not take the last response of a request")

    def ask_cancelled(self) -> bool:
        """Whether the client gave up; False after FINAL. A round trip to Triton's process."""
        with self._lock:
            return not self._is_final and bool(self._sender.is_cancelled())

    def _pass_on(self, response: Any | None, is_final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        if response is None:
            self._sender.send(flags=flags)
        else:
            self._sender.send(response, flags)


class CancelWatch:
    """The live requests whose cancel somebody wants to hear of. Any thread adds and discards, one asks."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake`: there is somebody to ask about."""
        self._wake = wake
        self._lock = threading.Lock()
        self._callbacks: dict[Channel, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, channel: Channel, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks.setdefault(channel, []).append(callback)
        self._wake()

    def discard(self, channel: Channel) -> None:
        with self._lock:
            self._callbacks.pop(channel, None)

    def ask_all(self) -> None:
        """Asks about each request, and tells of those that were cancelled, once."""
        with self._lock:
            channels = list(self._callbacks)
        for channel in channels:
            if channel.ask_cancelled():
                with self._lock:
                    callbacks = self._callbacks.pop(channel, [])
                for callback in callbacks:
                    callback()
