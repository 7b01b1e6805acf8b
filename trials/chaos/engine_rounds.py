"""Rounds in which an engine fails while streams are live.

Used by the runner. Independent of protocols and of how servers are set up. Invariant: each round records the number of
faults it injected, and judges every stream it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass

from .faults import KILL, KILL_WITH_FORK_SERVER, Fault, Injected
from .load import MIN_LIVE, Load, Run
from .specs import POISON, poisoned
from .stage import Stage
from .table import Row

OVER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class EngineRound:
    """`times` faults at random moments. fails: each fault ends one stream with an error. beside: what else happens to
    the streams."""

    model: str
    fault: Fault
    times: int
    seed: int
    pause_s: tuple[float, float] = (0.05, 0.8)
    concurrency: int = 40
    fails: bool = False
    beside: str = ""


async def break_engine(stage: Stage, round_: EngineRound) -> Row:
    row = Row(f"{round_.fault.name}{round_.beside} ({round_.model})", how="failed" if round_.fails else "")
    rng = random.Random(round_.seed)
    async with stage.load(round_.model, round_.concurrency) as load:
        for _ in range(round_.times):
            await load.until_live(min(MIN_LIVE, round_.concurrency))
            await asyncio.sleep(rng.uniform(*round_.pause_s))
            injected = await round_.fault.inject(stage.server, round_.model, rng)
            row.injected += 1
            await stage.recovery_s(row, round_.model, round_.fault, injected, load.arrivals)
            if not round_.fault.ends_engine:
                await _until_over(load, injected.at_s)
    stage.judge(row, load.runs, may_fail=round_.times if round_.fails else 0)
    if round_.fails:
        row.check(row.otherwise == row.injected, f"{row.otherwise} streams failed, expected {row.injected}")
    await stage.check_idle(row, round_.model)
    return row


async def _until_over(load: Load, injected_s: float) -> None:
    """An engine runs a failed step again row by row: the next fault must not hit one of these, where it would rightly
    be the row's own. Tokens for all streams twice over cannot come before that is done."""
    async with asyncio.timeout(OVER_TIMEOUT_S):
        while load.arrivals.count_after(injected_s) < 2 * load.live:
            await asyncio.sleep(0.01)


async def kill_while_starting(stage: Stage, model: str, seed: int, times: int = 4) -> Row:
    """The engine is killed, and so is the one that follows, before or after its first step."""
    row = Row(f"SIGKILL twice in a row ({model})")
    rng = random.Random(seed)
    async with stage.load(model) as load:
        for _ in range(times):
            await load.until_live(MIN_LIVE)
            await asyncio.sleep(rng.uniform(0.3, 0.8))
            injected = await KILL.inject(stage.server, model, rng)
            starting = await stage.server.engine_pids_other_than(injected.engines, model)
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            with contextlib.suppress(ProcessLookupError):
                os.kill(starting[0], signal.SIGKILL)
            row.injected += 2
            await stage.recovery_s(
                row, model, KILL, Injected([*injected.engines, *starting], time.monotonic()), load.arrivals
            )
    stage.judge(row, load.runs)
    await stage.check_idle(row, model)
    return row


async def poison(stage: Stage, model: str, seed: int, times: int = 3) -> Row:
    """A request that kills every engine that computes it fails alone, with an error that says why."""
    row = Row(f"poison request ({model})", how="failed")
    path = stage.server.fault_directory(model) / "poison"
    specs = stage.specs(model)
    async with stage.load(model) as load:
        path.write_text(str(ord(POISON)))
        for number in range(times):
            await load.until_live(MIN_LIVE)
            run = await load.one(poisoned(specs[(seed + number * 5) % len(specs)]))
            row.injected += 1
            _check_poison(row, run)
    path.unlink()
    stage.judge(row, load.runs)
    await stage.check_idle(row, model)
    return row


def _check_poison(row: Row, run: Run) -> None:
    row.streams += 1
    error = run.outcome.error
    row.otherwise += error is not None
    row.check(error is not None, f"the poison request ({run.spec.protocol}) completed")
    if error is not None:
        row.check("engine" in error, f"the poison request's error does not say why: {error!r}")
        print(f"    poison ({run.spec.protocol}): {run.outcome.code} {error}", flush=True)


async def cancel_while_restarting(stage: Stage, model: str, seed: int, times: int = 5) -> Row:
    """Clients go away while there is no engine to tell; the others go on, and no block stays behind."""
    row = Row(f"cancel while the engine restarts ({model})", how="left")
    rng = random.Random(seed)
    async with stage.load(model) as load:
        for _ in range(times):
            await load.until_live(MIN_LIVE)
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            injected = await KILL.inject(stage.server, model, rng)
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            load.abandon(10, rng)
            row.injected += 1
            await stage.recovery_s(row, model, KILL, injected, load.arrivals)
    stage.judge(row, load.runs)
    await stage.check_idle(row, model)
    return row


async def was_preempted(stage: Stage, model: str) -> Row:
    """By the load of the rounds before, which were judged."""
    row = Row(f"sequences preempted ({model})")
    row.check(await stage.server.metric("vllm:num_preemptions_total", model) > 0, "none was: the blocks were enough")
    return row


async def give_up(stage: Stage, model: str, other: str, weights: str) -> Row:
    """An engine that cannot start again: the model is not ready and says why, another serves on, a reload heals it."""
    row = Row(f"engine cannot start ({model})", how="failed")
    server = stage.server
    file, aside = server.model_directory(model) / weights, server.directory / "aside"
    async with stage.load(other, 8) as bystanders:
        async with stage.load(model, 8) as load:
            await load.until_live(8)
            await asyncio.sleep(0.3)
            file.rename(aside)
            # Its fork server has the weights, and could start engines without the file.
            await KILL_WITH_FORK_SERVER.inject(server, model, random.Random(0))
            row.injected += 1
            load.begin_no_more()
            row.check(await _becomes_not_ready(stage, model), f"{model} is ready although its engine cannot start")
        failed = sum(run.outcome.error is not None for run in load.runs)
        row.check(failed > 0, "no stream of the given-up model failed: what did they wait for?")
        await _check_given_up(stage, row, model, other)
        aside.rename(file)
        os.utime(file)
        status, text = await server.post(f"/v2/repository/models/{model}/load")
        row.check(status == 200, f"the reload answered {status}: {text}")
        status, _ = await server.get(f"/v2/models/{model}/ready")
        row.check(status == 200, f"{model} answers {status} to ready after the reload")
        async with stage.load(model, 8) as again:
            await again.until_live(8)
    stage.judge(row, load.runs, may_fail=failed)
    stage.judge(row, [*bystanders.runs, *again.runs])
    await stage.check_idle(row, model)
    return row


async def _becomes_not_ready(stage: Stage, model: str, timeout_s: float = 90.0) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            while (await stage.server.get(f"/v2/models/{model}/ready"))[0] == 200:
                await asyncio.sleep(0.2)
    except TimeoutError:
        return False
    return True


async def _check_given_up(stage: Stage, row: Row, model: str, other: str) -> None:
    index = await stage.server.index_row(model)
    row.check(index.get("state") == "UNAVAILABLE" and bool(index.get("reason")), f"the index says {index}")
    print(f"    index: {index}", flush=True)
    ready = [(await stage.server.get(path))[0] for path in (f"/v2/models/{other}/ready", "/v2/health/live")]
    row.check(ready == [200, 200], f"the other model and live answer {ready}")
    status, text = await stage.server.post(f"/v2/models/{model}/generate", {"text_input": "x"})
    row.check(status in (400, 503) and bool(text), f"a request to the given-up model answers {status} {text}")
    print(f"    refusal: {status} {text}", flush=True)
