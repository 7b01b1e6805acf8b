"""Streams whose clients reconnect when their frontend is gone, and the arrival time of each piece.

Used by the rounds. Independent of what ended a connection and of what is expected. Invariants: when a request is sent
again, the earlier output is stored separately and judged by itself; every lost connection is recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from ..clients import StreamClient
from ..clients.grpc_resumed import ResumedGrpcClient
from ..clients.patience import AGAIN_S, Patience
from ..clients.responses_api import ResponsesClient
from ..clients.resumable import ResumableClient
from ..load import Arrivals, Clients, LiveStream, Run
from ..outcome import Outcome, Piece, StreamFailed
from ..specs import Protocol, StreamSpec

PATIENCE_S = 60.0
"""For a server that is gone: far more than any promise, so that what is late counts as late, not as lost."""
KEYED_EVERY = 3
_LONG = 1000
"""Events: a connection ends when its frontend does, not by its client."""
_KEPT = ("resumed_generate", "resumed_grpc", "resumed_agent", "background")
_PASSED_ON = (*_KEPT, "responses")
_LOST_CALLS = ("Socket closed", "onnection re", "ailed to connect", "GOAWAY", "RST_STREAM", "cancelled by the server's")
"""Of gRPC, in place of a status of the server's: 'connection reset', 'connection refused', ..."""


@dataclass(frozen=True)
class Address:
    """Of frontends: host:port."""

    http: str
    grpc: str


@dataclass(frozen=True)
class Break:
    """A connection that ended before its stream. Monotonic seconds."""

    spec: StreamSpec
    began_s: float
    ended_s: float
    error: str


@dataclass(frozen=True)
class ReturnedRun(Run):
    """broken: what came over each connection that was lost, of a request that was then sent again. times_s: begin,
    pieces and end of the stream, ascending monotonic seconds."""

    broken: Sequence[Outcome] = ()
    times_s: Sequence[float] = ()


class Returning:
    """Clients of the frontends at `addresses`, each stream at the next one; at another one when they come back."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.breaks: list[Break] = []
        self._clients = [Clients(address.http, address.grpc) for address in addresses]
        self._turn = itertools.cycle(range(len(addresses)))
        patience = Patience(PATIENCE_S, self._note)
        streams = ResumableClient(lambda: self._next(addresses).http, patience=patience, longest=_LONG)
        self._by_protocol: dict[Protocol, StreamClient] = {
            "resumed_generate": streams,
            "resumed_grpc": ResumedGrpcClient(lambda: self._next(addresses).grpc, patience),
            "resumed_agent": streams,
            "background": ResponsesClient(lambda: self._next(addresses).http, patience=patience),
        }

    def of(self, spec: StreamSpec) -> StreamClient:
        return self._by_protocol.get(spec.protocol) or AnyAddress(self)

    def next(self) -> Clients:
        return self._clients[next(self._turn)]

    async def close(self) -> None:
        for clients in self._clients:
            await clients.close()
        for client in set(self._by_protocol.values()):
            await client.close()

    async def __aenter__(self) -> Returning:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _next(self, addresses: Sequence[Address]) -> Address:
        return addresses[next(self._turn)]

    def _note(self, spec: StreamSpec, error: StreamFailed) -> None:
        now_s = time.monotonic()
        self.breaks.append(Break(spec, now_s, now_s, f"{error} {error.code}"))


class AnyAddress:
    """Each time that pieces are asked for, of another address."""

    def __init__(self, clients: Returning) -> None:
        self._clients = clients
        self.breaks = clients.breaks

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        async with aclosing(self._clients.next().of(spec).pieces(spec)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        pass


class ReturningStream(LiveStream):
    """A request is sent again when its connection is lost, unless its client goes on behind what it has. Some have an
    `Idempotency-Key`, the same each time."""

    def __init__(self, spec: StreamSpec, client: StreamClient, arrivals: Arrivals) -> None:
        self.times = _OwnArrivals(arrivals)
        if spec.index % KEYED_EVERY == 0:
            spec = replace(spec, key=uuid.uuid4().hex)
        super().__init__(spec, client, self.times)

    async def _read(self, client: StreamClient) -> ReturnedRun:
        broken: list[Outcome] = []
        while True:
            began_s = time.monotonic()
            run = await super()._read(client)
            is_again = is_lost(run.outcome) or (run.outcome.code == "503" and is_passed_on(self.spec))
            if run.abandoned or not isinstance(client, AnyAddress) or not is_again:
                self.times.note()
                return ReturnedRun(self.spec, run.outcome, run.abandoned, tuple(broken), self.times.all_s)
            client.breaks.append(Break(self.spec, began_s, time.monotonic(), run.outcome.error or ""))
            broken.append(run.outcome)
            await asyncio.sleep(AGAIN_S)


class _OwnArrivals(Arrivals):
    """Of one stream, told to those of all. Begins with the stream."""

    def __init__(self, of_all: Arrivals) -> None:
        super().__init__()
        self._of_all = of_all
        self.note()

    def note(self) -> None:
        super().add()

    def add(self) -> None:
        super().add()
        self._of_all.add()


def is_passed_on(spec: StreamSpec) -> bool:
    """Whether frontends pass the request on to their host, whose end is then the request's, too."""
    return bool(spec.key) or spec.protocol in _PASSED_ON


def can_come_back(spec: StreamSpec) -> bool:
    """Whether hosts keep what clients come back for."""
    return spec.protocol in _KEPT


def is_lost(outcome: Outcome) -> bool:
    """Whether the connection was lost, by no word of the server."""
    if outcome.error is None:
        return False
    return outcome.code == "connection" or any(text in outcome.error for text in _LOST_CALLS)
