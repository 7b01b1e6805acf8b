"""Maintains a number of live streams for as long as a round needs them.

Used by every round. Independent of faults and of what is expected. Invariants: when the load has ended, every stream
that was started is in `runs`, whether it completed, failed, was abandoned or did not end in time; streams start in the
cyclic order of the specs.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol as Interface

from .clients import StreamClient
from .clients.agent_api import AgentClient
from .clients.generate import GenerateClient
from .clients.grpc_resumed import ResumedGrpcClient
from .clients.grpc_stream import GrpcClient
from .clients.messages_api import MessagesClient
from .clients.openai_api import OpenAIClient
from .clients.responses_api import ResponsesClient
from .clients.resumable import ResumableClient
from .outcome import Collector, Outcome, StreamFailed
from .specs import Protocol, StreamSpec

MIN_LIVE = 32
"""Streams that must live when a fault is injected."""
STREAM_TIMEOUT_S = 300.0
"""A stream that has not ended by then is lost: on a machine with nothing else to do none takes a tenth of that."""


@dataclass(frozen=True)
class Run:
    """One stream that is over. abandoned: its client went away on purpose."""

    spec: StreamSpec
    outcome: Outcome
    abandoned: bool = False


class Arrivals:
    """When tokens came, on any stream: monotonic seconds, ascending."""

    def __init__(self) -> None:
        self._times_s: list[float] = []

    def add(self) -> None:
        self._times_s.append(time.monotonic())

    @property
    def all_s(self) -> tuple[float, ...]:
        return tuple(self._times_s)

    def count_after(self, when_s: float) -> int:
        return len(self._times_s) - bisect.bisect_right(self._times_s, when_s)

    def first_after(self, when_s: float) -> float | None:
        index = bisect.bisect_right(self._times_s, when_s)
        return self._times_s[index] if index < len(self._times_s) else None


class Clients:
    """One client of each protocol to one server. receive_buffer_bytes: see http_transport."""

    def __init__(self, http: str, grpc: str, receive_buffer_bytes: int = 0) -> None:
        openai = OpenAIClient(http, receive_buffer_bytes)
        resumable = ResumableClient(lambda: http, receive_buffer_bytes)
        responses = ResponsesClient(lambda: http, receive_buffer_bytes)
        self._by_protocol: dict[Protocol, StreamClient] = {
            "generate": GenerateClient(http, receive_buffer_bytes),
            "grpc": GrpcClient(grpc),
            "chat": openai,
            "completions": openai,
            "agent": AgentClient(http, receive_buffer_bytes),
            "responses": responses,
            "background": responses,
            "resumed_generate": resumable,
            "resumed_grpc": ResumedGrpcClient(lambda: grpc),
            "resumed_agent": resumable,
            "messages": MessagesClient(http, receive_buffer_bytes),
        }

    async def close(self) -> None:
        for client in set(self._by_protocol.values()):
            await client.close()

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def of(self, spec: StreamSpec) -> StreamClient:
        return self._by_protocol[spec.protocol]


class ClientChoice(Interface):
    """Which client reads a stream."""

    def of(self, spec: StreamSpec) -> StreamClient: ...


class LiveStream:
    """One stream while it runs. Owner: its own task."""

    def __init__(self, spec: StreamSpec, client: StreamClient, arrivals: Arrivals) -> None:
        self.spec = spec
        self.has_begun = False
        """Its client has had an answer."""
        self._abandoned = False
        self._arrivals = arrivals
        self._task = asyncio.create_task(self._read(client))

    def abandon(self) -> None:
        """The client goes away now."""
        self._abandoned = True
        self._task.cancel()

    async def ended(self) -> Run:
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self._abandoned:
                raise
            return Run(self.spec, Outcome(), abandoned=True)  # before it sent a byte

    async def _read(self, client: StreamClient) -> Run:
        seen = Collector()
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S), aclosing(client.pieces(self.spec)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    seen.add(piece)
                    self.has_begun = True
                    self._arrivals.add()
        except StreamFailed as error:
            return Run(self.spec, seen.outcome(str(error), error.code), self._abandoned)
        except TimeoutError:
            return Run(self.spec, seen.outcome(f"no end after {STREAM_TIMEOUT_S:g} s"))
        except asyncio.CancelledError:
            if not self._abandoned:
                raise
            return Run(self.spec, seen.outcome(), abandoned=True)
        return Run(self.spec, seen.outcome())


class Load:
    """`async with Load(...)` keeps `concurrency` streams live; leaving it begins no new ones and waits for the rest."""

    def __init__(
        self,
        clients: ClientChoice,
        specs: Sequence[StreamSpec],
        concurrency: int,
        stream: type[LiveStream] = LiveStream,
    ) -> None:
        self.runs: list[Run] = []
        self._stream = stream
        self.arrivals = Arrivals()
        self._clients = clients
        self._specs: Iterator[StreamSpec] = itertools.cycle(specs)
        self._concurrency = concurrency
        self._live: set[LiveStream] = set()
        self._workers: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def streams(self) -> list[LiveStream]:
        """That live now."""
        return list(self._live)

    async def __aenter__(self) -> Load:
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    async def drain(self) -> None:
        self.begin_no_more()
        await asyncio.gather(*self._workers)

    def begin_no_more(self) -> None:
        self._closing = True

    async def until_live(self, count: int, timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.live < count:
                await asyncio.sleep(0.01)

    async def until_begun(self, timeout_s: float) -> None:
        """Until every live stream has had an answer, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not all(stream.has_begun for stream in self._live):
                    await asyncio.sleep(0.01)

    def abandon(self, count: int, rng: random.Random) -> int:
        """Some clients go away; how many."""
        chosen = rng.sample(sorted(self._live, key=id), min(count, self.live))
        for stream in chosen:
            stream.abandon()
        return len(chosen)

    async def one(self, spec: StreamSpec) -> Run:
        """A stream beside the others; not in `runs`."""
        return await LiveStream(spec, self._clients.of(spec), Arrivals()).ended()

    async def _work(self) -> None:
        while not self._closing:
            spec = next(self._specs)
            stream = self._stream(spec, self._clients.of(spec), self.arrivals)
            self._live.add(stream)
            try:
                run = await stream.ended()
            finally:
                self._live.discard(stream)
            self.runs.append(run)  # a judge that runs while the load goes on puts a new list there


async def undisturbed(
    clients: ClientChoice, specs: Iterable[StreamSpec], concurrency: int = 32
) -> dict[StreamSpec, Outcome]:
    """What each request gives on an undisturbed server. Raises RuntimeError when one fails."""
    expected: dict[StreamSpec, Outcome] = {}
    left = iter(list(specs))

    async def work() -> None:
        for spec in left:
            run = await LiveStream(spec, clients.of(spec), Arrivals()).ended()
            if run.outcome.error is not None:
                raise RuntimeError(f"undisturbed run of {spec} failed: {run.outcome.error} {run.outcome.code}")
            expected[spec] = run.outcome

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return expected
