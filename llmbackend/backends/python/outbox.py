"""The host's messages to a stub that must never wait: cancellations, and answers to what a model asked.

For: StubProcess. Does not know: what messages mean. Invariants: `post` never blocks, because it is called where a
client is cancelled or another model sends; messages leave in the order they were posted; what can not be sent now waits
for one thread that exists only while something waits; to a stub that is gone, nothing is sent and nothing is an error.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from .stub.packets import Packet, encode

log = logging.getLogger(__name__)


class Outbox:
    """Any thread may post. Does not own the socket."""

    def __init__(self, to: socket.socket) -> None:
        self._socket = to
        self._lock = threading.Lock()
        self._waiting: deque[Packet] = deque()
        self._is_closed = False
        self._sender: threading.Thread | None = None

    def post(self, message: Any, parts: Sequence[Any] = ()) -> None:
        try:
            packet = encode(message, parts)
        except OSError:
            log.exception("a message to a stub process could not be made")
            return
        with self._lock:
            if not self._is_closed and (self._waiting or not self._send_now(packet)):
                self._waiting.append(packet)
                self._start_sender()
                return
        packet.close()

    def close(self) -> None:
        """After the stub is gone."""
        with self._lock:
            self._is_closed = True
            while self._waiting:
                self._waiting.popleft().close()
            sender = self._sender
        if sender is not None:
            sender.join()

    def _send_now(self, packet: Packet) -> bool:
        """False when there is no room. Holds the lock."""
        with contextlib.suppress(OSError):  # the stub is gone
            try:
                packet.send(self._socket, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return True

    def _start_sender(self) -> None:
        """Holds the lock."""
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_waiting, name="python-outbox", daemon=True)
            self._sender.start()

    def _send_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._sender = None
                    return
                packet = self._waiting[0]
            with contextlib.suppress(OSError):  # the stub is gone
                packet.send(self._socket)
            packet.close()
            with self._lock:
                if self._waiting and self._waiting[0] is packet:
                    self._waiting.popleft()
