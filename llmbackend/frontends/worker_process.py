"""A worker process: `python -m llmbackend.frontends.worker_process DESCRIPTOR`, and its messages with the server.

Messages are pickles with out-of-band buffers, so that tensors and bodies are neither pickled nor copied under the GIL.
Pickle never reads client data: both ends are this package, on an unnamed socket. The process ends with its server. If
memory runs out, the kernel kills this process first: a 64 MiB body of brackets takes 2 GiB to parse, and an
address-space limit does not help, since orjson reserves 8 GiB and uses little.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from llmbackend.core.errors import TritonError, internal, unavailable
from llmbackend.core.tensors import RawTensor, Tensor, from_wire, wire_view

_PROTOCOL: Final = 5
_COUNT: Final = struct.Struct("<I")


def to_worker(connection: socket.socket, message: Any) -> None:
    """Raises OSError if the other end is gone."""
    _send(connection, message, from_wire)


def to_server(connection: socket.socket, message: Any) -> None:
    """Like `to_worker`, but string tensors arrive as RawTensors."""
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
    """Raises EOFError if the other end has closed, OSError if it is gone or sends nothing for too long."""
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
    """`recv` releases the GIL while it fills its result."""
    parts: list[bytes] = []
    missing = size
    while missing:
        part = connection.recv(missing, socket.MSG_WAITALL)
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


_NICENESS: Final = 10
"""Streams have priority over parsing, which may take seconds anyway."""
_OOM_SCORE: Final = "1000"


def main(descriptor: int) -> None:
    """Serves calls until the server closes the socket `descriptor`."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    with contextlib.suppress(EOFError, OSError), socket.socket(fileno=descriptor) as server:
        call = receive(server)  # imports what it needs: ten seconds at a low priority on a busy machine
        os.nice(_NICENESS)
        while True:
            _answer(server, *call)
            call = receive(server)


def _answer(server: socket.socket, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    result: Any
    try:
        succeeded, result = True, function(*arguments)
    except TritonError as error:
        succeeded, result = False, TritonError(error.message, error.code)
    except MemoryError:
        succeeded, result = False, unavailable("decoding the request takes more memory than allowed")
    except Exception:
        traceback.print_exc()
        succeeded, result = False, internal("internal error, see the server's log")
    to_server(server, (succeeded, result))


if __name__ == "__main__":
    main(int(sys.argv[1]))
