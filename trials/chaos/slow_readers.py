"""A round of clients that stop reading: they get everything if they resume in time, otherwise an error; no other client
is affected.

Used by the runner. Independent of where the server buffers waiting data. Invariant: a slow reader of each protocol is
judged, and so is the concurrent load.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from dataclasses import replace

from .load import Clients, Run, undisturbed
from .outcome import Collector, Outcome, StreamFailed
from .specs import Protocol, StreamSpec
from .stage import Stage
from .table import Row

PAUSE_S = 4.0
"""Longer than a stream of the load takes: all of it waits in buffers."""
CUT_TIMEOUT_S = 60.0
RECEIVE_BUFFER_BYTES = 64 << 10
WIDE_TOKENS = 8000
WIDE_PROTOCOLS: tuple[Protocol, ...] = ("generate", "grpc", "chat")


def wide_specs(model: str) -> list[StreamSpec]:
    """Streams of about 14 MB: the server lets 4 MiB wait for a client, and the system's send buffer takes as much
    again. (Completions are written by chat's code, and with their 5 logprobs would take three times the tokens.)"""
    return [
        StreamSpec(
            index=200_000 + index,
            protocol=protocol,
            model=model,
            prompt=f"wide {protocol}",
            sampling_json=json.dumps({"max_tokens": WIDE_TOKENS, "ignore_eos": True, "temperature": 0.0}),
            streams=True,
            logprobs=20,
        )
        for index, protocol in enumerate(WIDE_PROTOCOLS)
    ]


async def slow_readers(stage: Stage, model: str, wide: str) -> Row:
    row = Row(f"slow readers ({model})", how="cut")
    in_time = [spec for spec in stage.specs(model) if spec.streams][:8]
    too_slow = wide_specs(wide)
    expected = await _whole(stage, too_slow)
    address = stage.server.address
    async with stage.load(model, 32) as load, Clients(address.http, address.grpc, RECEIVE_BUFFER_BYTES) as clients:
        slow = replace(stage, clients=clients)
        await load.until_live(32)
        read = await asyncio.gather(*(_read_late(slow, spec, asyncio.sleep(PAUSE_S)) for spec in in_time))
        cut = await _all_too_slow(slow, row, too_slow, wide)
        row.injected += len(read) + len(cut)
    stage.judge(row, [*load.runs, *read])
    without = [replace(run, outcome=replace(run.outcome, logprobs=(), cumulative_logprob=None)) for run in cut]
    replace(stage, expected=expected).judge(row, without, may_fail=len(cut))
    for run in cut:
        row.check(run.outcome.error is not None, f"the slow {run.spec.protocol} reader got its whole stream")
        print(f"    cut ({run.spec.protocol}): {run.outcome.code} {run.outcome.error}", flush=True)
    await stage.check_idle(row, model)
    return row


async def _whole(stage: Stage, specs: Sequence[StreamSpec]) -> dict[StreamSpec, Outcome]:
    """The same requests without the logprobs, which make the streams so large."""
    light = {replace(spec, logprobs=None): spec for spec in specs}
    return {light[spec]: outcome for spec, outcome in (await undisturbed(stage.clients, list(light))).items()}


async def _all_too_slow(stage: Stage, row: Row, specs: Sequence[StreamSpec], model: str) -> list[Run]:
    """No client reads until the server has ended the requests."""
    gone = asyncio.Event()
    readers = [asyncio.create_task(_read_late(stage, spec, gone.wait())) for spec in specs]
    await asyncio.sleep(PAUSE_S)
    busy = await stage.server.still_busy(model, CUT_TIMEOUT_S)
    row.check(not busy, f"requests of clients that do not read go on: {busy}")
    gone.set()
    return list(await asyncio.gather(*readers))


async def _read_late(stage: Stage, spec: StreamSpec, pause: Awaitable[object]) -> Run:
    """Reads the first piece, then nothing until `pause` is over, then the rest."""
    seen = Collector()
    paused = False
    try:
        async with aclosing(stage.clients.of(spec).pieces(spec)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                seen.add(piece)
                if not paused:
                    await pause
                    paused = True
    except StreamFailed as error:
        return Run(spec, seen.outcome(str(error), error.code))
    return Run(spec, seen.outcome())
