"""`make soak`: saturation with random cancels and kills; afterwards, resource usage must be what it was before.

Checks that nothing leaks, without knowing what might. Invariants: usage is measured before and after while idle, with
no client connected, after the same steps; every stream that was not abandoned is judged. Tolerances: see
resources.differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .faults import KILL
from .load import Clients, Load, undisturbed
from .outcome import Outcome
from .resources import Sample, differences, slope_per_hour, take_sample
from .server import ServerUnderTest, demo, mock, nice, running
from .specs import Lengths, StreamSpec, make_specs
from .stage import Stage
from .table import Row

WARM_UP_S = 120.0
SAMPLE_S = 10.0
SETTLE_S = 5.0
MODELS = ("mock", "demo")
CONCURRENCY = {"mock": 32, "demo": 12}
KILL_EVERY_S = (10.0, 40.0)
CANCEL_EVERY_S = (0.2, 2.0)
LAST_KILL_S = 60.0
"""Before the end of a saturation every engine is killed once more: the idle samples see engines of one age."""
KV_BYTES = 24 << 20
"""Of the demo model: so little that each engine has touched all of it by its idle sample, however busy the machine."""


@dataclass
class Soak:
    """Owner of what has been seen so far: the event loop."""

    server: ServerUnderTest
    expected: dict[StreamSpec, Outcome]
    rng: random.Random
    began_s: float
    row: Row = field(default_factory=lambda: Row("soak", how="left"))
    samples: list[Sample] = field(default_factory=list)
    kills: int = 0

    async def sample(self) -> Sample:
        kv_usage = sum([await self.server.metric("vllm:kv_cache_usage_perc", model) for model in MODELS])
        return take_sample(self.server.pid, time.monotonic() - self.began_s, kv_usage)


async def run_soak(seconds: float, seed: int) -> int:
    """Prints begin, end and slopes; 1 when something does not end where it began."""
    models = [
        mock("mock", mock_step_ms=4, block_size=8, num_kv_blocks=700),
        demo("demo", kv_cache_memory_bytes=KV_BYTES),
    ]
    async with running(*models) as server:
        nice(5)
        specs = [
            *make_specs(seed, 64, "mock", Lengths(output_tokens=(20, 200))),
            *make_specs(seed + 1, 32, "demo", Lengths(output_tokens=(10, 80))),
        ]
        async with Clients(server.address.http, server.address.grpc) as clients:
            expected = await undisturbed(clients, specs)
        soak = Soak(server, expected, random.Random(seed), time.monotonic())
        await _saturate(soak, WARM_UP_S)
        begin = await _idle_sample(soak, "begin")
        soak.samples.clear()
        await _saturate(soak, seconds - WARM_UP_S)
        end = await _idle_sample(soak, "end")
        problems = differences(begin, end) + soak.row.problems
        breaches = sum([await _breaches(server, model) for model in MODELS])
        problems += [f"{breaches:g} invariant breaches were counted"] if breaches else []
    _print_slopes(soak.samples)
    for problem in problems[:20]:
        print(f"PROBLEM: {problem}")
    row = soak.row
    print(
        f"soak: {row.streams} streams, {row.completed} completed, {row.otherwise} left, {soak.kills} kills, "
        f"{row.lost + row.repeated + row.changed} lost, {len(problems)} problems"
    )
    return 1 if problems else 0


async def _saturate(soak: Soak, seconds: float) -> None:
    """Load, cancels, kills and samples for `seconds`; then the load drains and its clients close. The last thing done
    to each engine is a kill, so that engines have the same age whenever this ends."""
    end_s = time.monotonic() + seconds
    async with Clients(soak.server.address.http, soak.server.address.grpc) as clients:
        stage = Stage(soak.server, clients, soak.expected)
        loads = [stage.load(model, CONCURRENCY[model]) for model in MODELS]
        async with contextlib.AsyncExitStack() as live:
            for load in loads:
                await live.enter_async_context(load)
            async with asyncio.TaskGroup() as group:
                for model in MODELS:
                    group.create_task(_kill_now_and_then(soak, model, end_s))
                group.create_task(_cancel_now_and_then(soak, loads, end_s))
                group.create_task(_sample_now_and_then(soak, end_s))
                group.create_task(_judge_now_and_then(soak, stage, loads, end_s))
        for load in loads:
            stage.judge(soak.row, load.runs)


async def _kill_now_and_then(soak: Soak, model: str, end_s: float) -> None:
    while True:
        left_s = end_s - LAST_KILL_S - time.monotonic()
        await asyncio.sleep(max(min(soak.rng.uniform(*KILL_EVERY_S), left_s), 0.0))
        await KILL.inject(soak.server, model, soak.rng)
        soak.kills += 1
        if end_s - LAST_KILL_S <= time.monotonic():
            break
    await asyncio.sleep(max(end_s - time.monotonic(), 0.0))


async def _cancel_now_and_then(soak: Soak, loads: Sequence[Load], end_s: float) -> None:
    while time.monotonic() < end_s:
        await asyncio.sleep(soak.rng.uniform(*CANCEL_EVERY_S))
        soak.rng.choice(loads).abandon(soak.rng.randint(1, 3), soak.rng)


async def _sample_now_and_then(soak: Soak, end_s: float) -> None:
    while time.monotonic() < end_s:
        soak.samples.append(await soak.sample())
        _print_sample("load", soak.samples[-1])
        await asyncio.sleep(SAMPLE_S)


async def _judge_now_and_then(soak: Soak, stage: Stage, loads: Sequence[Load], end_s: float) -> None:
    """The harness keeps no outcomes longer than it must."""
    while time.monotonic() < end_s:
        await asyncio.sleep(1.0)
        for load in loads:
            runs, load.runs = load.runs, []
            stage.judge(soak.row, runs)


async def _idle_sample(soak: Soak, name: str) -> Sample:
    for model in MODELS:
        if reason := await soak.server.still_busy(model):
            soak.row.problems.append(f"at the {name}: {reason}")
    await asyncio.sleep(SETTLE_S)
    sample = await soak.sample()
    _print_sample(name, sample)
    return sample


async def _breaches(server: ServerUnderTest, model: str) -> float:
    return await server.metric("llmbackend:invariant_breaches_total", model)


def _print_sample(name: str, sample: Sample) -> None:
    print(
        f"{sample.time_s:6.0f} s {name:5s} host {sample.host_rss_mib:.1f} MiB, {sample.host_fds} fds, "
        f"{sample.host_threads} threads; {sample.engines} engines {sample.engines_rss_mib:.1f} MiB, "
        f"{sample.engines_fds} fds, {sample.engines_threads} threads, {100 * sample.kv_usage:.0f} % of KV",
        flush=True,
    )


def _print_slopes(samples: Sequence[Sample]) -> None:
    times_s = [sample.time_s for sample in samples]
    for name in ("host_rss_mib", "host_fds", "host_threads", "engines_rss_mib"):
        slope = slope_per_hour(times_s, [getattr(sample, name) for sample in samples])
        print(f"slope under load after the warm-up: {name} {slope:+.1f} per hour")
