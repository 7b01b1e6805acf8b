"""Streams of well-behaved clients during the fuzzing: they must get the same answers as from a quiet server.

Part of `make fuzz`. Independent of what is fuzzed. Invariants: each stream that was started is compared, token by
token, with the same request's answer from before the fuzzing; the clients run in their own process, so that the
fuzzer's work does not delay them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from types import TracebackType

from trials.chaos.judge import judge
from trials.chaos.load import Clients, Load, Run, undisturbed
from trials.chaos.outcome import Outcome
from trials.chaos.specs import Lengths, StreamSpec, make_specs

from .fuzzed_server import BYSTANDER_MODEL, FuzzedServer
from .tally import Finding, Tally

CONCURRENCY = 4
_SPECS = 48
_END_S = 150.0
"""What streams may take to end: STREAM_TIMEOUT_S of the load, and some."""


class Bystanders:
    """`with Bystanders(fuzzed, seed) as tally:` keeps streams running; when it is left, `tally` is their judgement."""

    def __init__(self, fuzzed: FuzzedServer, seed: int) -> None:
        self.tally = Tally("streams beside")
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        address = fuzzed.address
        self._process = context.Process(target=_main, args=(theirs, address.http, address.grpc, seed))

    def __enter__(self) -> Tally:
        self._process.start()
        assert self._ours.poll(_END_S) and self._ours.recv() == "ready", "a quiet server did not answer the streams"
        return self.tally

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.send("over")
        if self._ours.poll(_END_S):
            judged = self._ours.recv()
            self.tally.inputs, self.tally.findings = judged.inputs, judged.findings
        else:
            self.tally.add(Finding("hang", f"streams did not end in {_END_S:g} s"), None)
            self._process.kill()
        self._process.join()


def _main(parent: Connection, http: str, grpc: str, seed: int) -> None:
    parent.send(asyncio.run(_run(parent, http, grpc, seed)))


async def _run(parent: Connection, http: str, grpc: str, seed: int) -> Tally:
    specs = make_specs(seed, _SPECS, BYSTANDER_MODEL, Lengths(output_tokens=(20, 60)))
    tally = Tally("streams beside")
    async with Clients(http, grpc) as clients:
        expected = await undisturbed(clients, specs, concurrency=8)
        parent.send("ready")
        began_s = time.monotonic()
        async with Load(clients, specs, CONCURRENCY) as load:
            while not parent.poll():
                await asyncio.sleep(0.1)
                _judge(tally, load.runs, expected, began_s)
        _judge(tally, load.runs, expected, began_s)
    return tally


def _judge(tally: Tally, runs: list[Run], expected: dict[StreamSpec, Outcome], began_s: float) -> None:
    """Those that ended since the last call."""
    for run in runs[tally.inputs :]:
        tally.inputs += 1
        verdict = judge(expected[run.spec], run.outcome)
        if not verdict.is_clean:
            text = f"{time.monotonic() - began_s:.1f} s after the start: {verdict.reason}"
            tally.add(Finding("violation", text), run.spec)
