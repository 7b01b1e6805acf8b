"""Links within one machine: Unix sockets to which the sending thread writes directly.

Used by endpoints.py. Independent of what messages mean. Invariants: a message wakes no thread but its receiver; a
frontend that does not read delays no other; a peer that hangs is lost after the timeout, one that ends immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from llmbackend.waiting.wakeup import Wakeup

from .sockets import ConnectionOwner, Parts, Sender
from .wire import Frame

CHECKS: Final = 3
"""How often `check_peer` is called within the timeout of a silent peer."""
_COUNT: Final = struct.Struct("<I")
_ONE_PART: Final = struct.Struct("<IQ")
_PING: Final = _COUNT.pack(0)
_PONG_COUNT: Final = (1 << 32) - 1
_PONG: Final = _COUNT.pack(_PONG_COUNT)
_MAX_PARTS: Final = 1 << 16
_READ_BYTES: Final = 64 << 10
_READS_AT_ONCE: Final = 16
"""Limit on consecutive reads, so that others on the same thread are served."""
_LARGE_READ_BYTES: Final = 256 << 10
_COPIED_BYTES: Final = 64 << 10
"""Messages up to this size are copied into a single buffer."""
_WRITES_AT_ONCE: Final = 16
_BUFFERS_AT_ONCE: Final = 64


class MessageSocket:
    """Messages over a connected socket. `send` and `flush` may be called by any thread, the rest by one thread. An
    OSError means that the peer is lost."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._lock = threading.Lock()
        """Held while sending."""
        self._outbox: deque[memoryview] = deque()
        self._read = memoryview(b"")
        """Bytes read so far; those from `_at` on have not been handed out yet."""
        self._at = 0
        self._large: memoryview | None = None
        """Buffer for a message that takes several reads."""
        self._num_large_bytes = 0
        """How many of its bytes have been read."""
        self._is_dry = False
        """Whether the last read took all available bytes."""
        self._has_heard = True
        """Whether bytes have arrived since the last `check_peer`."""
        self._num_silent_checks = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        with self._lock:  # a sender must not use the descriptor after its reuse
            self._socket.close()

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether something waits to be sent; `flush` must then be called when the socket is writable."""
        return bool(self._outbox)

    def send(self, message: Sequence[Frame]) -> None:
        if len(message) == 1:
            head = _ONE_PART.pack(1, len(message[0]))
        else:
            head = struct.pack(f"<I{len(message)}Q", len(message), *map(len, message))
        self._send(head, message)

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _send_word(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # `receive` notices the end
            self._send(word)

    def _send(self, head: bytes, parts: Sequence[Frame] = ()) -> None:
        with self._lock:
            if sum(map(len, parts)) > _COPIED_BYTES:
                self._outbox.extend(map(memoryview, (head, *parts)))
                self._flush()
                return
            data = b"".join((head, *parts))
            num_sent = 0 if self._outbox else self._send_now(data)
            if num_sent < len(data):
                self._outbox.append(memoryview(data)[num_sent:])

    def _send_now(self, data: bytes) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def _flush(self) -> None:
        outbox = self._outbox
        for _ in range(_WRITES_AT_ONCE):
            if not outbox:
                break
            try:
                num_sent = self._socket.sendmsg(list(islice(outbox, _BUFFERS_AT_ONCE)))
            except BlockingIOError:
                break
            while outbox and num_sent >= len(outbox[0]):
                num_sent -= len(outbox.popleft())
            if num_sent:
                outbox[0] = outbox[0][num_sent:]

    # --- receiving --------------------------------------------------------------------------------------------------

    def receive(self) -> Parts | None:
        """The next message; None if none is complete, or after _READS_AT_ONCE reads. To be called until it returns
        None. Raises EOFError if the peer has ended and all its messages were received, ValueError for malformed bytes.
        """
        for _ in range(_READS_AT_ONCE):
            while (message := self._next()) is not None:
                if message:
                    return message
            if self._is_dry:
                break
            self._is_dry = self._read_some()
        self._is_dry = False
        return None

    def _next(self) -> Parts | None:
        """The next message among the bytes read, [] for one that is handled here; None = incomplete."""
        read, at = self._read, self._at
        num_bytes = len(read) - at
        if num_bytes < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(read, at)
        if count in (0, _PONG_COUNT):
            self._at = at + _COUNT.size
            if count == 0:
                self._send_word(_PONG)
            return []
        if count > _MAX_PARTS:
            raise ValueError(f"a message of {count} parts")
        start = _COUNT.size + 8 * count
        if num_bytes < start:
            return None
        sizes = struct.unpack_from(f"<{count}Q", read, at + _COUNT.size)
        end = start + sum(sizes)
        if num_bytes < end:
            if end > _READ_BYTES:
                self._begin_large(end)
            return None
        return self._parts(at + start, sizes)

    def _parts(self, start: int, sizes: Sequence[int]) -> Parts:
        parts = []
        for size in sizes:
            parts.append(self._read[start : start + size])
            start += size
        self._at = start
        return parts

    def _begin_large(self, size_bytes: int) -> None:
        rest = self._read[self._at :]
        self._large = memoryview(bytearray(size_bytes))
        self._large[: len(rest)] = rest
        self._num_large_bytes = len(rest)
        self._read, self._at = memoryview(b""), 0

    def _read_some(self) -> bool:
        """Returns whether all available bytes were read."""
        try:
            wanted, found = self._read_small() if self._large is None else self._read_large(self._large)
        except BlockingIOError:
            return True
        if not found:
            raise EOFError
        self._has_heard = True
        return found < wanted

    def _read_small(self) -> tuple[int, int]:
        data = self._socket.recv(_READ_BYTES)
        rest = self._read[self._at :]
        self._read, self._at = memoryview(b"".join((rest, data)) if rest else data), 0
        return _READ_BYTES, len(data)

    def _read_large(self, large: memoryview) -> tuple[int, int]:
        wanted = min(len(large) - self._num_large_bytes, _LARGE_READ_BYTES)
        found = self._socket.recv_into(large[self._num_large_bytes :], wanted)
        self._num_large_bytes += found
        if self._num_large_bytes == len(large):
            self._read, self._at, self._large = large, 0, None
        return wanted, found

    # --- silence ----------------------------------------------------------------------------------------------------

    def check_peer(self) -> bool:
        """Returns False if the peer counts as lost. To be called CHECKS times within the timeout, after everything was
        received; asks a silent peer for a sign of life."""
        self._num_silent_checks = 0 if self._has_heard else self._num_silent_checks + 1
        self._has_heard = False
        if self._num_silent_checks == 1:
            self._send_word(_PING)
        return self._num_silent_checks <= CHECKS


log = logging.getLogger(__name__)

SILENCE_TIMEOUT_S: Final = 15.0
"""Longer than over a network, because the peer's own loop must answer rather than ZeroMQ's threads."""
_BACKLOG: Final = 128
_ENDS: Final = (OSError, EOFError, ValueError)
"""Errors that end a MessageSocket."""


class UnixHostSocket:
    """A HostSocket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.endpoint = f"ipc://{path}"
        self._path = path
        self._check_interval_s = timeout_s / CHECKS
        self._check_at_s = 0.0
        self._numbers = itertools.count(1)
        self._connections: dict[Sender, MessageSocket] = {}
        self._senders: dict[int, Sender] = {}
        """Senders by file descriptor."""
        self._full: set[Sender] = set()
        """Senders with a non-empty outbox whose writability is not polled yet."""
        self._has_lost = False
        self._poll = select.poll()

    def bind(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        try:
            self._path.unlink(missing_ok=True)  # left behind by a previous host
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
        until_check_s = max(self._check_at_s - time.monotonic(), 0)
        self._poll.poll(min(timeout_s, until_check_s) * 1e3)
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
        if not received and time.monotonic() >= self._check_at_s:
            self._check_peers()
        return received

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.error("a frontend cannot be connected: %s", error)
            self._poll.unregister(self._listener)  # until the next check_peer: `poll` would return at once
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
                log.error("closing a connection with another protocol: %s", error)
            self._lose(sender)
            return received
        self._poll.modify(connection, select.POLLIN | (select.POLLOUT if connection.is_waiting else 0))
        return received

    def _check_peers(self) -> None:
        self._check_at_s = time.monotonic() + self._check_interval_s
        self._poll.register(self._listener, select.POLLIN)
        for sender, connection in list(self._connections.items()):
            if not connection.check_peer():
                log.warning("a frontend is silent: it counts as lost")
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
        self._check_interval_s = timeout_s / CHECKS
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._messages: MessageSocket | None = None
        self._is_writing = False
        """Whether the loop watches for writability."""
        self._next: asyncio.Handle | None = None
        """The next `_check_peers`, or `on_end` of a connection that could not be established."""

    def open(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(str(self._path))
        except OSError:  # nobody is listening, or the backlog is full
            connection.close()
            self._next = self._loop.call_soon(self._owner.on_end)
            return
        self._messages = MessageSocket(connection)
        self._loop.add_reader(connection.fileno(), self._owner.on_readable)
        self._next = self._loop.call_later(self._check_interval_s, self._check_peers)

    def receive(self) -> Parts | None:
        if self._messages is None:
            return None
        try:
            message = self._messages.receive()
        except _ENDS:
            self._end()
            return None
        self._watch_outbox(self._messages)  # receiving may send answers
        return message

    def send(self, message: list[Frame]) -> None:
        if self._messages is None:
            return
        with contextlib.suppress(OSError):  # `receive` notices the end
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
        is_lost = True
        with contextlib.suppress(OSError):  # `receive` notices the end
            messages.flush()
            is_lost = False
        if is_lost or not messages.is_waiting:
            self._is_writing = False
            self._loop.remove_writer(messages.fileno())

    def _check_peers(self) -> None:
        self._owner.on_readable()
        if self._messages is None:
            return
        self._next = self._loop.call_later(self._check_interval_s, self._check_peers)
        if not self._messages.check_peer():
            self._end()

    def _end(self) -> None:
        self.close()
        self._owner.on_end()


def _flush_within(messages: MessageSocket, seconds: float) -> None:
    poll = select.poll()  # unlike select.select, for any descriptor
    poll.register(messages, select.POLLOUT)
    deadline_s = time.monotonic() + seconds
    while messages.is_waiting and (left_s := deadline_s - time.monotonic()) > 0:
        poll.poll(1e3 * left_s)
        messages.flush()
