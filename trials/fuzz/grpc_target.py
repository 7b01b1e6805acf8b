"""gRPC over sockets: calls, and bytes on the port that are not HTTP/2.

Part of `make fuzz`. Independent of what a call contains. Invariants: an RPC ends in time, with a status other than
UNKNOWN or an INTERNAL that indicates a bug of ours; a stream's requests are answered in band.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc

from llmbackend.frontends.grpc.rpc import INTERNAL_ERROR

from .fuzzed_server import HANG_S, FuzzedServer
from .grpc_inputs import SHARED_MEMORY_KEY, STREAM, GrpcInput
from .tally import Finding

_SERVICE = "/inference.GRPCInferenceService/"


class GrpcTarget:
    def __init__(self, fuzzed: FuzzedServer) -> None:
        self._fuzzed = fuzzed
        self._channel = grpc.insecure_channel(fuzzed.address.grpc)
        self._region = Path(f"/dev/shm{SHARED_MEMORY_KEY}")
        self._region.write_bytes(b"\5\0\0\0hello".ljust(8192, b"\0"))

    def close(self) -> None:
        self._channel.close()
        self._region.unlink()

    def __call__(self, given: GrpcInput) -> None:
        try:
            answers = list(self._call(given))
        except grpc.RpcError as error:
            _check_status(error)
            answers = []
        if any(INTERNAL_ERROR.encode() in answer for answer in answers):
            raise Finding("5xx", f"in band: {INTERNAL_ERROR}")
        self._fuzzed.check()

    def _call(self, given: GrpcInput) -> Iterable[bytes]:
        if given.rpc == STREAM:
            stream: Any = self._channel.stream_stream(_SERVICE + STREAM)
            answers: Iterable[bytes] = stream(iter(given.messages), timeout=HANG_S)
            return answers
        service = "/grpc.health.v1.Health/" if given.rpc == "Check" else _SERVICE
        unary: Any = self._channel.unary_unary(service + given.rpc)
        return [unary(given.messages[0], timeout=HANG_S)]


def _check_status(error: Any) -> None:
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise Finding("hang", f"no end in {HANG_S:g} s")
    if code is grpc.StatusCode.UNKNOWN or text == INTERNAL_ERROR:
        raise Finding("5xx", f"{code.name}: {text[:300]}")


class RawGrpcTarget:
    """Bytes on the gRPC port; the RPCs of other connections go on."""

    def __init__(self, fuzzed: FuzzedServer) -> None:
        self._fuzzed = fuzzed
        host, _, port = fuzzed.address.grpc.partition(":")
        self._address = (host, int(port))
        self._count = itertools.count(1)

    def __call__(self, sent: bytes) -> None:
        with socket.create_connection(self._address, timeout=HANG_S) as connection:
            try:
                connection.sendall(sent)
                connection.settimeout(0.05)
                while connection.recv(1 << 16):
                    pass
            except (TimeoutError, ConnectionError):
                pass
        self._fuzzed.check()
        if next(self._count) % 25 == 0:
            self._check_answers()

    def _check_answers(self) -> None:
        with grpc.insecure_channel(self._fuzzed.address.grpc) as channel:
            try:
                is_live: Any = channel.unary_unary(_SERVICE + "ServerLive")
                is_live(b"", timeout=HANG_S)
            except grpc.RpcError as error:
                raise Finding("hang", f"ServerLive: {error}") from None
