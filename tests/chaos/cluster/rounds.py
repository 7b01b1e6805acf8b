"""Rounds in which parts of a cluster are killed or cut off, of one kind or of all kinds at once.

For: the runner. Does not know: processes, protocols. Invariant: a kill of a round with a limit comes when the cluster
has recovered from the last one, so that a pause is that of one kill.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..load import Load
from .kills import Kill, Kind
from .returning import ReturningStream
from .stage import ClusterStage, is_steady
from .table import ClusterRow

MIN_LIVE = 16
RECOVERY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class KillRound:
    """`times` kills of `kinds`, by turns chance's. limit_s: of the pause of 99 % of them; None where kills come without
    waiting for what the last one did."""

    name: str
    kinds: Sequence[Kind]
    times: int
    seed: int
    limit_s: float | None = None
    concurrency: int = 36
    pause_s: tuple[float, float] = (0.05, 0.4)

    async def run(self, stage: ClusterStage) -> ClusterRow:
        row = ClusterRow(self.name, self.limit_s)
        rng = random.Random(self.seed)
        async with stage.load(self.concurrency) as load:
            for _ in range(self.times):
                await load.until_live(min(MIN_LIVE, self.concurrency))
                if self.limit_s is not None:
                    await stage.cluster.until_whole()
                await asyncio.sleep(rng.uniform(*self.pause_s))
                row.kills.append(await stage.strike(rng.choice(self.kinds), rng))
                if self.limit_s is not None:
                    await _until_flowing(load, row.kills[-1], row)
        await stage.cluster.until_whole()
        stage.judge(row, load.runs)
        await stage.check_idle(row)
        return row


async def _until_flowing(load: Load, kill: Kill, row: ClusterRow) -> None:
    """Until each steady stream that lived has ended or got something since."""
    waiting = [stream for stream in load.streams if isinstance(stream, ReturningStream) and is_steady(stream.spec)]
    try:
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            await asyncio.sleep(0.1)
            since_s = kill.end_s + 0.1
            while any(not stream.times.count_after(since_s) and stream in load.streams for stream in waiting):
                await asyncio.sleep(0.02)
    except TimeoutError:
        row.problems.append(f"streams still waited {RECOVERY_TIMEOUT_S:g} s after {kill.kind} {kill.victim}")
