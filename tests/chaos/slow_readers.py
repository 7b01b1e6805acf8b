"""A round of clients that stop reading: they get everything if they come back in time, else an error; nobody else
notices.

For: the runner. Does not know: where the server keeps what waits. Invariant: a slow reader of each protocol is judged,
and so is the load beside them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from dataclasses import replace

from .load import Run, undisturbed
from .outcome import Collector, StreamFailed
from .specs import PROTOCOLS, StreamSpec
from .stage import Stage
from .table import Row

PAUSE_S = 4.0
"""Longer than a stream of the load takes: all of it waits in buffers."""
CUT_TIMEOUT_S = 60.0
WIDE_TOKENS = {"generate": 6000, "grpc": 6000, "chat": 6000, "completions": 15000}


def wide_specs(model: str) -> list[StreamSpec]:
    """One stream for each protocol whose events come to 15 MB and more: the server's limit and the sockets' buffers
    together hold less. Completions allow 5 logprobs, so theirs takes more tokens."""
    return [
        StreamSpec(
            index=200_000 + index,
            protocol=protocol,
            model=model,
            prompt=f"wide {protocol}",
            sampling_json=json.dumps({"max_tokens": WIDE_TOKENS[protocol], "ignore_eos": True, "temperature": 0.0}),
            streams=True,
            logprobs=5 if protocol == "completions" else 20,
        )
        for index, protocol in enumerate(PROTOCOLS)
    ]


async def slow_readers(stage: Stage, model: str, wide: str) -> Row:
    row = Row(f"slow readers ({model})", how="cut")
    in_time = [spec for spec in stage.specs(model) if spec.streams][:8]
    too_slow = wide_specs(wide)
    expected = await undisturbed(stage.clients, too_slow)
    async with stage.load(model, 32) as load:
        await load.until_live(32)
        read = await asyncio.gather(*(_read_late(stage, spec, asyncio.sleep(PAUSE_S)) for spec in in_time))
        cut = await _all_too_slow(stage, row, too_slow, wide)
        row.injected += len(read) + len(cut)
    stage.judge(row, [*load.runs, *read])
    replace(stage, expected=expected).judge(row, cut, may_fail=len(cut))
    for run in cut:
        row.check(run.outcome.error is not None, f"the slow {run.spec.protocol} reader got its whole stream")
        print(f"    cut ({run.spec.protocol}): {run.outcome.code} {run.outcome.error}", flush=True)
    await stage.check_idle(row, model)
    return row


async def _all_too_slow(stage: Stage, row: Row, specs: Sequence[StreamSpec], model: str) -> list[Run]:
    """Nobody reads until the server has ended the requests."""
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
