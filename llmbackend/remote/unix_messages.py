"""MessageSocket: messages over a connected Unix socket.

For: both ends of a link within one machine. Does not know: what messages say, who waits for the socket. Invariants: it
never blocks; what the socket does not take waits in memory, in order; each message arrives in memory of its own; a
peer that does not answer counts as gone, and the time in which this process did not run is no silence of the peer.

On the wire a message is the number of its parts (u32), their sizes (u64 each), and the parts. Two numbers of parts mean
something else: "are you there?" and "I am".
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from .sockets import Parts
from .tensors import Frame

LOOKS: Final = 3
"""How often `look` is called within the time after which a silent peer is gone."""
_COUNT: Final = struct.Struct("<I")
_ONE_PART: Final = struct.Struct("<IQ")
_ASK: Final = _COUNT.pack(0)
_ANSWER_COUNT: Final = (1 << 32) - 1
_ANSWER: Final = _COUNT.pack(_ANSWER_COUNT)
_MAX_PARTS: Final = 1 << 16
_READ_BYTES: Final = 64 << 10
_READS_AT_ONCE: Final = 16
"""Then others on the same thread have their turn."""
_LARGE_READ_BYTES: Final = 256 << 10
_COPIED_BYTES: Final = 64 << 10
"""Up to which a message is copied into one piece."""
_WRITES_AT_ONCE: Final = 16
_BUFFERS_AT_ONCE: Final = 64


class MessageSocket:
    """`send` and `flush` may be called by any thread, the others by one. Their errors are the socket's: the peer is
    gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._lock = threading.Lock()
        """Of sending."""
        self._outbox: deque[memoryview] = deque()
        self._read = memoryview(b"")
        """What was read; its messages are handed out from `_at` on."""
        self._at = 0
        self._large: memoryview | None = None
        """A message that comes in several reads."""
        self._num_large_bytes = 0
        """Of it, so far."""
        self._is_dry = False
        """Whether the last read has taken all that there was."""
        self._has_heard = True
        """Since the last look."""
        self._num_silent_looks = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        with self._lock:  # its descriptor may be another's next
            self._socket.close()

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether something waits to be sent: then `flush` is to be called when the socket is writable."""
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

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # who receives hears of the end
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
        """The next message; None when all that was there is received, or others should have their turn. To be called
        until then. Raises EOFError when the peer has gone and all that it sent was received, and ValueError for what is
        no message."""
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
        """The next message of what was read, empty for one that this object has handled; None: it is not all there."""
        read, at = self._read, self._at
        num_bytes = len(read) - at
        if num_bytes < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(read, at)
        if count in (0, _ANSWER_COUNT):
            self._at = at + _COUNT.size
            if count == 0:
                self._say(_ANSWER)
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
        """Whether that was all that there is."""
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

    def look(self) -> bool:
        """Whether the peer is there, as far as is known. To be called when everything was received, LOOKS times within
        the time after which a silent peer is gone; asks a peer that says nothing by itself."""
        self._num_silent_looks = 0 if self._has_heard else self._num_silent_looks + 1
        self._has_heard = False
        if self._num_silent_looks == 1:
            self._say(_ASK)
        return self._num_silent_looks <= LOOKS
