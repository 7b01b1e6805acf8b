"""Messages between the server and a worker process: pickles with their large buffers beside them.

For: both ends. Does not know: what is called. Invariants: tensors and bodies are neither pickled nor copied under the
interpreter's lock, but sent and received as buffers; a tensor of strings arrives at the server as a RawTensor, so that
its elements become objects only where their number is bounded. Both ends are this package, and the server starts the
other one over a socket without a name: pickle never reads data from clients.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from llmbackend.core.tensors import RawTensor, Tensor, from_wire, wire_view

_PROTOCOL: Final = 5
_COUNT: Final = struct.Struct("<I")


def to_worker(connection: socket.socket, message: Any) -> None:
    """Raises OSError when the other end is gone."""
    _send(connection, message, from_wire)


def to_server(connection: socket.socket, message: Any) -> None:
    """As `to_worker`, but tensors of strings arrive as RawTensors."""
    _send(connection, message, RawTensor)


def _send(connection: socket.socket, message: Any, tensor_of_strings: Callable[..., Any]) -> None:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, _PROTOCOL, buffer_callback=buffers.append)
    pickler.tensor_of_strings = tensor_of_strings
    pickler.dump(message)
    parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    connection.sendall(_COUNT.pack(len(parts)) + struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts)))
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> Any:
    """Raises EOFError when the other end has closed, OSError when it is gone or says nothing for too long."""
    (count,) = _COUNT.unpack(_exactly(connection, _COUNT.size))
    sizes = struct.unpack(f"<{count}Q", _exactly(connection, 8 * count))
    pickled, *buffers = [_exactly(connection, size) for size in sizes]
    return pickle.loads(pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    tensor_of_strings: Callable[..., Any]

    def reducer_override(self, value: Any) -> Any:
        if type(value) is RawTensor:
            raw = pickle.PickleBuffer(value.raw)
            return RawTensor, (value.name, value.datatype, value.shape, raw)
        if type(value) is Tensor:
            make = self.tensor_of_strings if value.datatype == "BYTES" else from_wire
            return make, (value.name, value.datatype, value.shape, pickle.PickleBuffer(wire_view(value)))
        if type(value) is memoryview:
            return memoryview, (pickle.PickleBuffer(value),)
        return NotImplemented


def _exactly(connection: socket.socket, size: int) -> bytes:
    """`recv` fills its result without holding the interpreter's lock."""
    parts: list[bytes] = []
    missing = size
    while missing:
        part = connection.recv(missing, socket.MSG_WAITALL)
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
