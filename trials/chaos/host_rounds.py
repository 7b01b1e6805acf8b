"""Rounds in which clients misbehave, the host is told to stop, or a model is reloaded.

Used by the runner. Independent of engine faults. Invariant: each round records the number of faults it injected, and
judges every stream it started.
"""

from __future__ import annotations

import asyncio
import os
import random

from .faults import KILL
from .load import MIN_LIVE, Run
from .stage import Stage
from .table import Row


async def disconnects(stage: Stage, model: str, seed: int, times: int = 30) -> Row:
    """Clients of every protocol go away at random moments, in the middle of a stream or before its first token."""
    row = Row(f"client disconnects ({model})", how="left")
    rng = random.Random(seed)
    async with stage.load(model) as load:
        for _ in range(times):
            await load.until_live(MIN_LIVE)
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            row.injected += load.abandon(rng.randint(1, 4), rng)
    stage.judge(row, load.runs)
    await stage.check_idle(row, model)
    return row


async def reload(stage: Stage, model: str, seed: int, times: int = 4) -> Row:
    """The model is loaded anew under load: running streams end on the old version, new ones begin on the new."""
    row = Row(f"model reload under load ({model})")
    rng = random.Random(seed)
    engines = len(stage.server.engine_pids(model))
    async with stage.load(model) as load:
        for _ in range(times):
            await load.until_live(MIN_LIVE)
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            os.utime(stage.server.model_directory(model) / "1" / "model.json")
            status, text = await stage.server.post(f"/v2/repository/models/{model}/load")
            row.injected += 1
            row.check(status == 200, f"the reload answered {status}: {text}")
    stage.judge(row, load.runs)
    await stage.check_idle(row, model)
    row.check(await _settles(stage, model, engines), f"engine processes: {stage.server.engine_pids(model)}")
    index = await stage.server.index_row(model)
    row.check(index["state"] == "READY", f"the index says {index}")
    return row


async def _settles(stage: Stage, model: str, engines: int, timeout_s: float = 20.0) -> bool:
    """The old versions' engines end; as many as before stay."""
    try:
        async with asyncio.timeout(timeout_s):
            while len(stage.server.engine_pids(model)) != engines:
                await asyncio.sleep(0.1)
    except TimeoutError:
        return False
    return True


async def sigterm(stage: Stage, model: str, seed: int, *, kill: bool) -> Row:
    """SIGTERM under load: what runs completes (even if the engine dies meanwhile), what comes is refused, exit 0."""
    row = Row(
        f"SIGTERM under load{', then SIGKILL of the engine' if kill else ''} ({model})", injected=1, how="refused"
    )
    rng = random.Random(seed)
    async with stage.load(model) as load:
        await load.until_live(MIN_LIVE)
        await asyncio.sleep(rng.uniform(0.3, 0.8))
        load.begin_no_more()
        await load.until_begun(1.0)  # what the server has not read yet, it would refuse; others may wait for a place
        stage.server.remember_processes()
        stage.server.terminate()
        if kill:
            await asyncio.sleep(0.1)
            await KILL.inject(stage.server, model, rng)
            row.injected += 1
        await asyncio.sleep(0.1)
        late = [await load.one(spec) for spec in stage.specs(model)[:8]]
    stage.judge(row, load.runs)
    _check_refused(row, late)
    code = await stage.server.exit_code()
    row.check(code == 0, f"the server's exit code is {code}, expected 0")
    left = await stage.server.processes_left()
    row.check(not left, f"processes outlived the server: {left}")
    return row


def _check_refused(row: Row, late: list[Run]) -> None:
    """By the server's word or a closed port, never by silence."""
    for run in late:
        row.streams += 1
        row.otherwise += run.outcome.error is not None
        error = run.outcome.error or ""
        is_refusal = "stopping" in error or run.outcome.code in ("connection", "StatusCode.UNAVAILABLE", "UNAVAILABLE")
        row.check(is_refusal, f"{run.spec.protocol} after SIGTERM: {run.outcome.code!r} {error!r}, expected a refusal")
