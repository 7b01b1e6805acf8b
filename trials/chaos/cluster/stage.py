"""A cluster, its clients, and the undisturbed result of each request on it.

Used by the rounds. Independent of which processes exist. Invariants: expectations come from this very cluster before
anything is done to it; every stream that a round started is judged, and every lost connection must be explained by
something that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..agents.api_requests import API_PROTOCOLS
from ..agents.api_validity import api_validity
from ..agents.validity import validity
from ..judge import judge, judge_prefix
from ..load import Load, Run, undisturbed
from ..outcome import Outcome
from ..specs import StreamSpec
from .kills import Kill, Kind
from .pauses import longest_pause
from .returning import Address, ReturnedRun, Returning, ReturningStream, is_passed_on
from .table import ClusterRow

STEADY = ("generate", "grpc", "chat", "completions", "resumed_generate", "resumed_grpc")
"""Protocols whose streams here bring a piece with nearly each token: a call, or a constrained answer whose bytes are no
whole characters, pauses by itself."""


class Cluster(Protocol):
    """Frontends, hosts and engines, on however many machines."""

    @property
    def addresses(self) -> Sequence[Address]:
        """Of frontends; each stays the same when its frontends are started again."""
        ...

    async def until_whole(self) -> None:
        """Returns when all that was killed is back. Raises TimeoutError naming what is not."""
        ...

    async def strike(self, kind: Kind, rng: random.Random) -> Kill:
        """Kills one process of this kind, or cuts one link until it heals."""
        ...

    async def still_busy(self) -> str:
        """What some host or engine still holds although there is nothing to do; "" = nothing."""
        ...


def is_steady(spec: StreamSpec) -> bool:
    return spec.streams and spec.protocol in STEADY


def _name(spec: StreamSpec) -> str:
    """For people."""
    return f"{spec.protocol} stream {spec.index}"


@dataclass
class ClusterStage:
    cluster: Cluster
    clients: Returning
    expected: dict[StreamSpec, Outcome]
    kills: list[Kill] = field(default_factory=list)

    def load(self, concurrency: int) -> Load:
        return Load(self.clients, list(self.expected), concurrency, ReturningStream)

    async def strike(self, kind: Kind, rng: random.Random) -> Kill:
        kill = await self.cluster.strike(kind, rng)
        self.kills.append(kill)
        return kill

    def judge(self, row: ClusterRow, runs: Iterable[Run]) -> None:
        streamed = []
        for run in runs:
            assert isinstance(run, ReturnedRun)
            self._judge_one(row, run)
            if is_steady(run.spec):
                streamed.append((_name(run.spec), run.times_s))
        lost: dict[str, list[float]] = {}
        for one in self.clients.breaks:
            lost.setdefault(_name(one.spec), []).append(one.ended_s)
        pauses = [longest_pause(kill, streamed, lost) for kill in row.kills]
        row.pauses = sorted(pause for pause in pauses if pause is not None)
        self._judge_breaks(row)
        if row.limit_s is not None and row.pauses:
            row.check(row.pause_p99.seconds <= row.limit_s, f"the pause of 99 %: {row.pause_p99}")

    def _judge_one(self, row: ClusterRow, run: ReturnedRun) -> None:
        spec, seen, expected = run.spec, run.outcome, self.expected[run.spec]
        name = f"{spec.protocol} stream {spec.index} of {spec.model}"
        row.streams += 1
        for outcome in run.broken:
            row.sent_again += 1
            row.add(judge_prefix(expected, outcome), name=f"{name}, before its connection was lost")
        verdict = judge(expected, seen)
        row.completed += verdict.is_clean
        row.add(verdict, name=name)
        if spec.protocol in ("agent", "resumed_agent"):
            row.add_validity(validity(spec, seen), name=name)
        elif spec.protocol in API_PROTOCOLS:
            row.add_validity(api_validity(spec, seen), name=name)

    def _judge_breaks(self, row: ClusterRow) -> None:
        breaks = list(self.clients.breaks)
        self.clients.breaks.clear()
        row.came_back = len(breaks) - row.sent_again
        for one in breaks:
            passed_on = is_passed_on(one.spec)
            explained = (kill.explains(one.began_s, one.ended_s, is_passed_on=passed_on) for kill in self.kills)
            row.check(any(explained), f"{one.spec.protocol} stream {one.spec.index}: lost its connection: {one.error}")

    async def check_idle(self, row: ClusterRow) -> None:
        """All requests gone and all blocks back, on every host and engine."""
        if reason := await self.cluster.still_busy():
            row.problems.append(reason)


@contextlib.asynccontextmanager
async def open_stage(
    cluster: contextlib.AbstractAsyncContextManager[Cluster], specs: Sequence[StreamSpec]
) -> AsyncIterator[ClusterStage]:
    async with cluster as running, Returning(running.addresses) as clients:
        await asyncio.wait_for(running.until_whole(), 120)
        yield ClusterStage(running, clients, await undisturbed(clients, specs))
