"""Ends of links within one machine: Unix sockets, written by the thread that has something to say.

For: endpoints.py. Does not know: what messages say. Invariants: no thread stands between two ends, so that a message
wakes its receiver and nobody else; a frontend that does not read holds up no other; a peer that hangs is gone after the
timeout, one that ends is gone at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import select
import socket
import time
from pathlib import Path
from typing import Final

from llmbackend.waiting.wakeup import Wakeup

from .sockets import ConnectionOwner, Parts, Sender
from .tensors import Frame
from .unix_messages import LOOKS, MessageSocket

log = logging.getLogger(__name__)

SILENCE_TIMEOUT_S: Final = 15.0
"""Longer than over a network, where threads of ZeroMQ answer: here the peer's own loop does."""
_BACKLOG: Final = 128
_ENDS: Final = (OSError, EOFError, ValueError)
"""After which a MessageSocket is of no use."""


class UnixHostSocket:
    """A HostSocket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.endpoint = f"ipc://{path}"
        self._path = path
        self._look_s = timeout_s / LOOKS
        self._look_at_s = 0.0
        self._numbers = itertools.count(1)
        self._connections: dict[Sender, MessageSocket] = {}
        self._senders: dict[int, Sender] = {}
        """By descriptor."""
        self._full: set[Sender] = set()
        """To whom something waits to be sent, which the poll does not watch for yet."""
        self._has_lost = False
        self._poll = select.poll()

    def bind(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        try:
            self._path.unlink(missing_ok=True)  # of a host before this one
            self._listener.bind(str(self._path))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise OSError(error.errno, f"cannot listen on {self.endpoint}: {error.strerror or error}") from None
        self._wakeup = Wakeup()
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for sender in list(self._connections):
            self._drop(sender)
        self._wakeup.close()

    def wait(self, timeout_s: float) -> None:
        while self._full:
            if (connection := self._connections.get(self._full.pop())) is not None:
                self._poll.modify(connection, select.POLLIN | select.POLLOUT)
        until_look_s = max(self._look_at_s - time.monotonic(), 0)
        self._poll.poll(min(timeout_s, until_look_s) * 1e3)
        self._wakeup.clear()

    def wake(self) -> None:
        self._wakeup.set()

    def has_lost(self) -> bool:
        had_lost, self._has_lost = self._has_lost, False
        return had_lost

    def send(self, to: Sender, message: list[Frame]) -> bool:
        connection = self._connections.get(to)
        if connection is None:
            return False
        try:
            connection.send(message)
        except OSError:
            return False
        if connection.is_waiting:
            self._full.add(to)
            self.wake()
        return True

    def receive(self) -> list[tuple[Sender, Parts]]:
        received: list[tuple[Sender, Parts]] = []
        for fd, events in self._poll.poll(0):
            if (sender := self._senders.get(fd)) is not None:
                received += self._receive_from(sender, bool(events & select.POLLOUT))
            elif fd == self._listener.fileno():
                self._accept()
        if not received and time.monotonic() >= self._look_at_s:
            self._look()
        return received

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.error("a frontend cannot be connected: %s", error)
            self._poll.unregister(self._listener)  # until the next look: its connection stays ready
            return
        connection, sender = MessageSocket(accepted), next(self._numbers).to_bytes(8)
        self._poll.register(connection, select.POLLIN)
        self._senders[connection.fileno()] = sender
        self._connections[sender] = connection

    def _receive_from(self, sender: Sender, is_writable: bool) -> list[tuple[Sender, Parts]]:
        connection = self._connections[sender]
        received = []
        try:
            while (message := connection.receive()) is not None:
                received.append((sender, message))
            if is_writable:
                connection.flush()
        except _ENDS as error:
            if isinstance(error, ValueError):
                log.error("a connection ends that speaks something else: %s", error)
            self._lose(sender)
            return received
        self._poll.modify(connection, select.POLLIN | (select.POLLOUT if connection.is_waiting else 0))
        return received

    def _look(self) -> None:
        self._look_at_s = time.monotonic() + self._look_s
        self._poll.register(self._listener, select.POLLIN)
        for sender, connection in list(self._connections.items()):
            if not connection.look():
                log.warning("a frontend is silent, and counts as gone")
                self._lose(sender)

    def _lose(self, sender: Sender) -> None:
        self._drop(sender)
        self._has_lost = True
        self.wake()

    def _drop(self, sender: Sender) -> None:
        connection = self._connections.pop(sender)
        self._poll.unregister(connection)
        del self._senders[connection.fileno()]
        connection.close()


class UnixConnection:
    """A Connection."""

    def __init__(self, path: Path, timeout_s: float, owner: ConnectionOwner) -> None:
        self._path = path
        self._look_s = timeout_s / LOOKS
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._messages: MessageSocket | None = None
        self._is_writing = False
        """Whether the loop tells when more can be sent."""
        self._next: asyncio.Handle | None = None
        """The look, or the end of what did not begin."""

    def open(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(str(self._path))
        except OSError:  # nobody is there, or too many come at once
            connection.close()
            self._next = self._loop.call_soon(self._owner.on_end)
            return
        self._messages = MessageSocket(connection)
        self._loop.add_reader(connection.fileno(), self._owner.on_readable)
        self._next = self._loop.call_later(self._look_s, self._look)

    def receive(self) -> Parts | None:
        if self._messages is None:
            return None
        try:
            message = self._messages.receive()
        except _ENDS:
            self._end()
            return None
        self._watch_outbox(self._messages)  # receiving answers
        return message

    def send(self, message: list[Frame]) -> None:
        if self._messages is None:
            return
        with contextlib.suppress(OSError):  # `receive` hears of the end
            self._messages.send(message)
        self._watch_outbox(self._messages)

    def close(self, linger_s: float = 0.0) -> None:
        if self._next is not None:
            self._next.cancel()
        messages, self._messages = self._messages, None
        if messages is None:
            return
        self._loop.remove_reader(messages.fileno())
        if self._is_writing:
            self._loop.remove_writer(messages.fileno())
        with contextlib.suppress(OSError):
            _flush_within(messages, linger_s)
        messages.close()

    def _watch_outbox(self, messages: MessageSocket) -> None:
        if messages.is_waiting and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(messages.fileno(), self._flush, messages)

    def _flush(self, messages: MessageSocket) -> None:
        try:
            messages.flush()
        except OSError:  # `receive` hears of the end
            is_done = True
        else:
            is_done = not messages.is_waiting
        if is_done:
            self._is_writing = False
            self._loop.remove_writer(messages.fileno())

    def _look(self) -> None:
        self._owner.on_readable()
        if self._messages is None:
            return
        self._next = self._loop.call_later(self._look_s, self._look)
        if not self._messages.look():
            self._end()

    def _end(self) -> None:
        self.close()
        self._owner.on_end()


def _flush_within(messages: MessageSocket, seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while messages.is_waiting and (left_s := deadline_s - time.monotonic()) > 0:
        select.select((), (messages,), (), left_s)
        messages.flush()
