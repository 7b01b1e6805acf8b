"""One fault under the streams of one server.

Used by the command line. Independent of how a fault is injected. Invariants: expectations come from this very server
before the fault; every stream that was started is counted once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from ..chaos.clients import StreamClient
from ..chaos.clients.openai_api import OpenAIClient
from ..chaos.load import Arrivals, LiveStream, Run, undisturbed
from ..chaos.outcome import Outcome
from ..chaos.specs import StreamSpec
from .faults import Fault, cpu_times_s, target
from .supervised import Supervised

PROBE_PERIOD_S = 1.0
PROBE_TIMEOUT_S = 60.0
_THINGS = (
    "a lighthouse",
    "a train",
    "the first snow",
    "a lost letter",
    "two brothers",
    "an old clock",
    "a garden",
    "the sea",
)
_PLACES = (
    "in Norway",
    "at night",
    "in a small town",
    "far away",
    "during a storm",
    "on a Sunday",
    "in 1920",
    "by a river",
)


@dataclass(frozen=True)
class Result:
    """Streams by how they ended. served_s: from the fault until a new request was answered; None = not in time."""

    whole: int
    lost: int
    changed: int
    hung: int
    served_s: float | None
    restarts: int
    ready_s: float
    error: str


class _Clients:
    """One client reads every stream."""

    def __init__(self, address: str) -> None:
        self._client = OpenAIClient(address)

    def of(self, spec: StreamSpec) -> StreamClient:
        return self._client


def make_specs(model: str, count: int, output_tokens: int) -> list[StreamSpec]:
    """Different prompts of one kind, greedy. As completions, whose first event is a token, not a role."""
    sampling = json.dumps({"max_tokens": output_tokens, "temperature": 0.0})
    return [
        StreamSpec(
            index=index,
            protocol="completions",
            model=model,
            prompt=f"This is a long story about {_THINGS[index % 8]} {_PLACES[index // 8 % 8]}. Once upon a time",
            sampling_json=sampling,
            streams=True,
            logprobs=None,
        )
        for index in range(count)
    ]


async def run_trial(server: Supervised, fault: Fault, streams: int, output_tokens: int) -> Result | None:
    """None: the fault hurts a worker, and the server has none beside its first process."""
    specs, clients = make_specs(server.model, streams, output_tokens), _Clients(server.rival.address)
    expected = await undisturbed(clients, specs, concurrency=streams)
    before_s, arrivals = cpu_times_s(server), Arrivals()
    live = [LiveStream(spec, clients.of(spec), arrivals) for spec in specs]
    await _until_begun(live)
    hit = target(server, before_s)
    if fault.hurts_worker and hit.worker == hit.first:
        await _end(live, 0.0)
        return None
    began_s = time.monotonic()
    async with fault.inject(hit):
        served = asyncio.create_task(_until_served(server, began_s, fault.patience_s))
        runs = await _end(live, fault.patience_s)
        served_s = await served
    return _judged(expected, runs, served_s, server)


async def _until_begun(live: Sequence[LiveStream], timeout_s: float = 120.0) -> None:
    """Until each of them has had a first piece."""
    async with asyncio.timeout(timeout_s):
        while not all(stream.has_begun for stream in live):
            await asyncio.sleep(0.01)


async def _end(live: Sequence[LiveStream], patience_s: float) -> list[Run]:
    """A stream that has not ended by then is hung; its client goes away."""
    ended = [asyncio.create_task(stream.ended()) for stream in live]
    await asyncio.wait(ended, timeout=patience_s)
    for stream, task in zip(live, ended, strict=True):
        if not task.done():
            stream.abandon()
    return list(await asyncio.gather(*ended))


async def _until_served(server: Supervised, began_s: float, patience_s: float) -> float | None:
    """A new request each second, until one of them is answered."""
    probes: set[asyncio.Task[None]] = set()
    try:
        while time.monotonic() < began_s + patience_s:
            probes.add(asyncio.create_task(_probe(server)))
            done, _ = await asyncio.wait(probes, timeout=PROBE_PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
            if any(probe.exception() is None for probe in done):
                return time.monotonic() - began_s
            probes -= done
            if done:
                await asyncio.sleep(PROBE_PERIOD_S / 2)
        return None
    finally:
        for probe in probes:
            probe.cancel()


async def _probe(server: Supervised) -> None:
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
    async with httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_S) as http:
        (await http.post(f"http://{server.rival.address}/v1/chat/completions", json=body)).raise_for_status()


def _judged(
    expected: dict[StreamSpec, Outcome], runs: Sequence[Run], served_s: float | None, server: Supervised
) -> Result:
    ways = Counter(way(expected[run.spec], run) for run in runs)
    errors = Counter(run.outcome.error for run in runs if run.outcome.error)
    return Result(
        whole=ways["whole"],
        lost=ways["lost"],
        changed=ways["changed"],
        hung=ways["hung"],
        served_s=None if served_s is None else round(served_s, 2),
        restarts=server.restarts,
        ready_s=round(server.ready_s, 1),
        error=errors.most_common(1)[0][0][:200] if errors else "",
    )


def way(expected: Outcome, run: Run) -> str:
    """A stream that ended in the middle without an error is lost, too."""
    seen = run.outcome
    if run.abandoned:
        return "hung"
    if seen.error is not None or (seen.text != expected.text and expected.text.startswith(seen.text)):
        return "lost"
    return "whole" if (seen.text, seen.finish_reason) == (expected.text, expected.finish_reason) else "changed"
