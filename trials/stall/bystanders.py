"""The process that runs concurrently with the attacks: an SSE stream, a gRPC stream and a health probe, all continuous.

Used by the run. Independent of attacks. Invariant: for each period it reports the longest wait for a token that ended
in it or is still going on, and likewise the slowest probe. The probe is answered by the event loop alone, so it shows
how long that was blocked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc
from tritonclient.grpc import service_pb2 as pb

from .served import KEY, STEADY

_TOKENS = 2000
_PROBE_EVERY_S = 0.01
_SAMPLING = {"max_tokens": _TOKENS, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class Stretch:
    """Of the time since the last one. `tokens`: how many came, over both streams; `errors`: what went wrong."""

    worst_probe_s: float
    worst_gap_s: float
    tokens: int
    errors: tuple[str, ...]

    def joined(self, later: Stretch) -> Stretch:
        return Stretch(
            max(self.worst_probe_s, later.worst_probe_s),
            max(self.worst_gap_s, later.worst_gap_s),
            self.tokens + later.tokens,
            self.errors + later.errors,
        )


class _Waits:
    """The longest wait between two marks."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.count = 0
        self._since_s: float | None = None

    def begin(self) -> None:
        self._since_s = time.monotonic()

    def end(self) -> None:
        if self._since_s is not None:
            self.worst_s = max(self.worst_s, time.monotonic() - self._since_s)
            self.count += 1
        self._since_s = None

    def take(self) -> tuple[float, int]:
        open_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        taken = max(self.worst_s, open_s), self.count
        self.worst_s, self.count = 0.0, 0
        return taken


def main(parent: Connection, http_address: str, grpc_address: str) -> None:
    """Says "ready" when both streams run; is told anything, says the Stretch."""
    asyncio.run(_Bystanders(parent, http_address, grpc_address).run())


class _Bystanders:
    def __init__(self, parent: Connection, http_address: str, grpc_address: str) -> None:
        self._parent = parent
        self._http, self._grpc = http_address, grpc_address
        self._probe, self._sse, self._rpc = _Waits(), _Waits(), _Waits()
        self._errors: list[str] = []

    async def run(self) -> None:
        loops = (self._probe_health, self._read_events, self._read_responses)
        tasks = [asyncio.create_task(self._for_ever(loop)) for loop in loops]
        while not (self._sse.count and self._rpc.count and self._probe.count):
            await asyncio.sleep(0.05)
        self._parent.send("ready")
        try:
            while True:
                await asyncio.to_thread(self._parent.recv)
                self._parent.send(self._take())
        except EOFError:
            for task in tasks:
                task.cancel()

    def _take(self) -> Stretch:
        (sse_s, sse_count), (rpc_s, rpc_count) = self._sse.take(), self._rpc.take()
        errors, self._errors = tuple(self._errors), []
        return Stretch(self._probe.take()[0], max(sse_s, rpc_s), sse_count + rpc_count, errors)

    async def _for_ever(self, once: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await once()
            except (OSError, EOFError, grpc.RpcError, asyncio.IncompleteReadError) as error:
                self._errors.append(f"{once.__name__}: {error!r}"[:300])
                await asyncio.sleep(0.1)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._http.partition(":")
        return await asyncio.open_connection(host, int(port))

    async def _probe_health(self) -> None:
        reader, writer = await self._connect()
        try:
            while True:
                self._probe.begin()
                writer.write(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                self._probe.end()
                if b" 200 " not in head.splitlines()[0]:
                    self._errors.append(f"health: {head[:60]!r}")
                await asyncio.sleep(_PROBE_EVERY_S)
        finally:
            writer.close()

    async def _read_events(self) -> None:
        body = json.dumps({"text_input": "beside", "stream": True, "parameters": _SAMPLING}).encode()
        reader, writer = await self._connect()
        try:
            head = f"POST /v2/models/{STEADY}/generate_stream HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            head += f"authorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            self._sse.begin()
            events = 0
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    self._sse.end()
                    events += 1
                    self._sse.begin()
                    if b'"error"' in line:
                        self._errors.append(f"SSE: {line[:200]!r}")
            if events < _TOKENS // 2:  # tokens that are ready together come together
                self._errors.append(f"SSE: {events} events for {_TOKENS} tokens")
        finally:
            writer.close()

    async def _read_responses(self) -> None:
        request = pb.ModelInferRequest(model_name=STEADY)
        for name, datatype, raw in (
            ("text_input", "BYTES", _string("beside")),
            ("stream", "BOOL", b"\1"),
            ("sampling_parameters", "BYTES", _string(json.dumps(_SAMPLING))),
        ):
            request.inputs.add(name=name, datatype=datatype, shape=[1])
            request.raw_input_contents.append(raw)
        async with grpc.aio.insecure_channel(self._grpc) as channel:
            call = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelStreamInferResponse.FromString,
            )(iter([request]), metadata=[("authorization", f"Bearer {KEY}")])
            self._rpc.begin()
            async for response in call:
                self._rpc.end()
                self._rpc.begin()
                if response.error_message:
                    self._errors.append(f"gRPC: {response.error_message[:200]}")


def _string(text: str) -> bytes:
    return len(text.encode()).to_bytes(4, "little") + text.encode()
