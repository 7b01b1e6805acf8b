"""Rounds in which parts of a cluster are killed or disconnected, of one kind or of all kinds at once.

Used by the runner. Independent of processes and protocols. Invariants: unless the round says otherwise, a kill happens
after the cluster has recovered from the previous one, so that each pause belongs to one kill; a host is killed only
when the cluster is complete and clients have returned from the last killed host, because surviving the death of one
host is promised, not of two at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..load import Load
from ..specs import StreamSpec
from .kills import Kill, Kind
from .returning import ReturningStream, can_come_back
from .stage import ClusterStage, is_steady
from .table import ClusterRow

MIN_LIVE = 16
RECOVERY_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class KillRound:
    """`times` kills of `kinds`, by turns chance's. limit_s: of the pause of 99 % of them; None: none is promised.
    one_at_a_time: whether a kill waits until all has recovered from the last one."""

    name: str
    kinds: Sequence[Kind]
    times: int
    seed: int
    limit_s: float | None = None
    concurrency: int = 36
    pause_s: tuple[float, float] = (0.05, 0.4)
    one_at_a_time: bool = True

    async def run(self, stage: ClusterStage) -> ClusterRow:
        row = ClusterRow(self.name, self.limit_s)
        rng = random.Random(self.seed)
        async with stage.load(self.concurrency) as load:
            for _ in range(self.times):
                await load.until_live(min(MIN_LIVE, self.concurrency))
                kind = rng.choice(self.kinds)
                if kind is Kind.HOST and row.kills:
                    await _until_flowing(load, row.kills, row, can_come_back)
                if self.one_at_a_time or kind is Kind.HOST:
                    await stage.cluster.until_whole()
                await asyncio.sleep(rng.uniform(*self.pause_s))
                row.kills.append(await stage.strike(kind, rng))
                if self.one_at_a_time:
                    await _until_flowing(load, row.kills, row, is_steady)
        await stage.cluster.until_whole()
        stage.judge(row, load.runs)
        await stage.check_idle(row)
        return row


async def _until_flowing(
    load: Load, kills: Sequence[Kill], row: ClusterRow, is_meant: Callable[[StreamSpec], bool]
) -> None:
    """Until each stream that is meant has ended or got something since the last kill and the end of all cuts."""
    waiting = [stream for stream in load.streams if isinstance(stream, ReturningStream) and is_meant(stream.spec)]
    kill, end_s = kills[-1], max(kill.end_s for kill in kills)
    try:
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            await asyncio.sleep(0.1)
            since_s = end_s + 0.1
            while any(not stream.times.count_after(since_s) and stream in load.streams for stream in waiting):
                await asyncio.sleep(0.02)
    except TimeoutError:
        row.problems.append(f"streams still waited {RECOVERY_TIMEOUT_S:g} s after {kill.kind} {kill.victim}")
