"""Rounds in which the system under the server fails: clock, disk and memory.

Used by the runner. Independent of how the faults are injected. Invariant: every stream must give its undisturbed
result.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from .stage import Stage
from .system_faults import FAILS, SystemFaults
from .table import Row

LIVE = 24
JUMPS_S = (-86_400, -3600, -2, 2, 3600, 86_400)
SLOW_SYNC_US = 400_000


async def clock_jumps(stage: Stage, model: str, seed: int, times: int = 20) -> Row:
    """As when time synchronisation sets a wrong clock: seconds to a day, forwards and backwards."""
    return await _disturbed(
        stage,
        Row(f"wall clock jumps ({model})"),
        model,
        seed,
        times,
        lambda faults, rng: faults.set(rng.choice(JUMPS_S)),
    )


async def failing_syncs(stage: Stage, model: str, seed: int, times: int = 10) -> Row:
    """fsync and fdatasync give EIO, under a response store on disk."""
    row = Row(f"fsync fails ({model})")
    return await _disturbed(stage, row, model, seed, times, lambda faults, _: faults.set(sync=FAILS))


async def slow_syncs(stage: Stage, model: str, seed: int, times: int = 10) -> Row:
    """Each fsync takes 0.4 s."""
    row = Row(f"slow disk ({model})")
    return await _disturbed(stage, row, model, seed, times, lambda faults, _: faults.set(sync=SLOW_SYNC_US))


async def memory_runs_out(stage: Stage, model: str, seed: int, times: int = 10) -> Row:
    """Something else in the server's container takes all memory that is left. What the kernel ends may be engines and
    the processes that they come from, never the host."""
    row, rng, memory = Row(f"memory runs out ({model})"), random.Random(seed), stage.server.memory
    assert memory is not None
    async with stage.load(model, LIVE) as load:
        for _ in range(times):
            await load.until_live(LIVE)
            await stage.server.engine_pid(model)  # without an engine, only the host would be left to end
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            async with memory.eaten():
                row.injected += 1
                await asyncio.sleep(rng.uniform(0.0, 2.0))
    stage.judge(row, load.runs)
    log = (stage.server.directory / "server.log").read_text()
    row.check("memory ran out; give the server more" in log, "the log does not say that memory ran out")
    await stage.check_idle(row, model)
    return row


async def _disturbed(
    stage: Stage,
    row: Row,
    model: str,
    seed: int,
    times: int,
    disturb: Callable[[SystemFaults, random.Random], None],
) -> Row:
    """Each disturbance lasts about a second."""
    rng, faults = random.Random(seed), stage.server.system_faults
    assert faults is not None
    async with stage.load(model, LIVE) as load:
        for _ in range(times):
            await load.until_live(LIVE)
            disturb(faults, rng)
            row.injected += 1
            await asyncio.sleep(rng.uniform(0.5, 1.5))
            faults.set()
    stage.judge(row, load.runs)
    await stage.check_idle(row, model)
    return row
