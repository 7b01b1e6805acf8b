"""Messages between the host and a stub process. Each message is one packet on a SOCK_SEQPACKET socket.

A message is a pickled plain value and any number of parts (raw bytes, such as a tensor's). Invariants: a packet is sent
completely or not at all, from any thread, without a lock; a larger message is stored in anonymous memory, whose
descriptor is sent with the packet; the host unpickles only plain values and runs no code, because a model's process
must not be able to harm it (a stub trusts the host).
"""

from __future__ import annotations

import array
import ctypes
import io
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

Part = Any
"""Anything with a flat byte buffer: bytes, a memoryview, an array of uint8."""
Message = tuple[Any, Sequence[Any]]

PACKET_BYTES = 64 * 1024
_FILE = "llmbackend-packet"
_FIRST_OF_PICKLE = 0x80
_INLINE, _MEMORY = 1, 2
_HEAD = struct.Struct("<B7xQ")
"""Kind and number of parts; followed by each part's size in bytes."""
_SIZE = struct.Struct("<Q")
_ALIGNMENT = 64
_MAX_CHUNKS = 512  # the limit of writev
_WITHOUT_WAITING = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_libc = ctypes.PyDLL(None)
_libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.send.restype = ctypes.c_ssize_t
_RIGHTS_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)


def socket_of(fd: int) -> socket.socket:
    """A socket with which this process was forked; programs that it starts do not inherit it."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


class Packet:
    """An encoded message, to be sent once or closed."""

    __slots__ = ("chunks", "memory_fd")

    def __init__(self, chunks: list[Part], memory_fd: int = -1) -> None:
        self.chunks = chunks
        self.memory_fd = memory_fd

    def send(self, to: socket.socket, flags: int = 0) -> None:
        """Raises OSError; with MSG_DONTWAIT, BlockingIOError if the socket is full; `send` can then be repeated."""
        if self.memory_fd < 0:
            if len(self.chunks) == 1:
                to.send(self.chunks[0], flags)
            else:
                to.sendmsg(self.chunks, (), flags)
            return
        rights = array.array("i", [self.memory_fd])
        to.sendmsg(self.chunks, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], flags)
        self.close()

    def send_under_lock(self, to: socket.socket) -> None:
        """Like `send`, but keeps the GIL if the packet is small and the socket is not full. A thread that releases the
        GIL must wait to get it back while another one runs Python."""
        if len(self.chunks) == 1 and self.memory_fd < 0:
            data = self.chunks[0]
            if _libc.send(to.fileno(), data, len(data), _WITHOUT_WAITING) == len(data):
                return
        self.send(to)

    def close(self) -> None:
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
            self.memory_fd = -1


def encode(message: Any, parts: Sequence[Part] = ()) -> Packet:
    """Raises OSError if there is no descriptor or memory for a large message."""
    pickled = pickle.dumps(message, 5)
    if not parts and len(pickled) <= PACKET_BYTES:
        return Packet([pickled])
    everything = [pickled, *parts]
    sizes = [len(part) for part in everything]
    sizes_text = b"".join(map(_SIZE.pack, sizes))
    chunks: list[Part] = []
    for part, size in zip(everything, sizes, strict=True):
        chunks += (part, bytes(-size % _ALIGNMENT))
    total = _HEAD.size + len(sizes_text) + sum(map(len, chunks))
    if total <= PACKET_BYTES:
        head = _HEAD.pack(_INLINE, len(sizes)) + sizes_text
        return Packet([head, bytes(-len(head) % _ALIGNMENT), *chunks])
    return Packet(
        [_HEAD.pack(_MEMORY, len(sizes))], _memory_of([sizes_text, bytes(-len(sizes_text) % _ALIGNMENT), *chunks])
    )


class PacketReader:
    """Reads one socket, from one thread at a time."""

    def __init__(self, source: socket.socket, *, is_trusted: bool = False) -> None:
        self._socket = source
        self._load = pickle.loads if is_trusted else _load_plain
        self._view = memoryview(bytearray(PACKET_BYTES + _ALIGNMENT))

    def receive(self) -> Message | None:
        """Blocks until the next message. Returns its value and its writable parts; None if the other end has ended.
        Raises TimeoutError after the socket's timeout, ValueError for a malformed message."""
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into([self._view], _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:  # it died before it had read all messages
            return None
        if not size:
            return None
        view = self._view[:size]
        if view[0] == _FIRST_OF_PICKLE and not ancillary:
            return self._load(view), ()
        fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
        try:
            kind, count = _HEAD.unpack_from(view)
            if kind == _INLINE:
                parts = _split(memoryview(bytearray(view))[_HEAD.size :], count, _HEAD.size)
                return self._load(parts[0]), parts[1:]
            if kind == _MEMORY and fds:
                parts = _split(_contents_of(fds[0]), count, 0)
                return self._load(parts[0]), parts[1:]
        except (struct.error, OSError) as error:
            raise ValueError(f"not a message: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
        raise ValueError("not a message")


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"a message must not contain a {module}.{name}")


def _load_plain(pickled: memoryview) -> Any:
    try:
        return _PlainValues(io.BytesIO(pickled)).load()
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {error}") from error


def _split(data: memoryview, count: int, skipped: int) -> list[memoryview]:
    """The pickled value and the parts. skipped: bytes before `data` that count for alignment."""
    if not count or len(data) < count * _SIZE.size:
        raise ValueError("not a message: it is shorter than its header says")
    sizes = [size for (size,) in _SIZE.iter_unpack(data[: count * _SIZE.size])]
    parts, offset = [], _aligned(count * _SIZE.size + skipped) - skipped
    for size in sizes:
        parts.append(data[offset : offset + size])
        offset += _aligned(size)
    return parts


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT


def _memory_of(chunks: list[Part]) -> int:
    """The descriptor of anonymous memory that contains the chunks."""
    fd = os.memfd_create(_FILE, os.MFD_CLOEXEC)
    try:
        waiting = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
        while waiting:
            written = os.writev(fd, waiting[:_MAX_CHUNKS])
            done = 0
            while done < len(waiting) and written >= len(waiting[done]):
                written -= len(waiting[done])
                done += 1
            del waiting[:done]
            if written:
                waiting[0] = waiting[0][written:]
    except BaseException:
        os.close(fd)
        raise
    return fd


def _contents_of(fd: int) -> memoryview:
    """Read rather than mapped: a mapping would keep the memory alive as long as any of the message's tensors."""
    data = np.empty(os.fstat(fd).st_size, dtype=np.uint8).data
    offset = 0
    while offset < len(data):
        count = os.preadv(fd, [data[offset:]], offset)
        if not count:
            raise ValueError("not a message: its shared memory has shrunk")
        offset += count
    return data
