"""A whole server as a state machine: real sockets, real clients of every protocol, an engine process that really dies.

Random mixes of streams, disconnects, stops by id, kills, faults in a step and reloads under load. Every request ends
exactly once; one that was not stopped is, token for token, what it is undisturbed; and at the end nothing is left: no
request, no KV block, no engine process too many, no descriptor, no breach that the server counted itself.
How to search with many more sequences: machine_settings.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.helpers.machine_settings import machine_settings
from tests.helpers.waiting import wait_for_self_check
from trials.chaos.judge import judge, judge_prefix
from trials.chaos.load import Arrivals, Clients, LiveStream, Run
from trials.chaos.outcome import Outcome
from trials.chaos.server import ServerUnderTest, mock, running
from trials.chaos.specs import Lengths, StreamSpec, make_specs

MODEL = "mock"
MAX_FAULTS = 3
"""Of one sequence: fewer deaths in a row than give an engine up."""
BLAMED = "times while running it"
BROKEN_LOGITS = "not finite"
STRUCK_ALONE = "injected fault"
"""A second exception came while the rows of a step that had raised one ran one by one."""
MAX_ENDLESS = 3
NUM_SPECS = 16
WAIT_S = 10.0
STOP_S = 30.0
"""How long a stop may take: the engine may be on its way back."""
NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)


class Stage:
    """A server, clients, and what every spec gives undisturbed. The event loop runs while a rule runs."""

    def __init__(
        self, runner: asyncio.Runner, server: ServerUnderTest, clients: Clients, http: httpx.AsyncClient
    ) -> None:
        self.server = server
        self.clients = clients
        self.arrivals = Arrivals()
        self.http = http
        self.specs = make_specs(3, NUM_SPECS, MODEL, Lengths((1, 8), (20, 80)))
        self.run = runner.run
        self.undisturbed = self.run(self._undisturbed())
        self.num_descriptors = self.process.num_fds()
        self.num_processes = len(self.process.children(recursive=True))

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.server.pid)

    def begin(self, spec: StreamSpec) -> LiveStream:
        return LiveStream(spec, self.clients.of(spec), self.arrivals)

    async def _undisturbed(self) -> list[Outcome]:
        """Runs all of them on a model that was loaded twice, so that what a server makes on first use is made."""
        await self.reload(1)
        return [run.outcome for run in await asyncio.gather(*(self.begin(spec).ended() for spec in self.specs))]

    async def reload(self, number: int) -> None:
        """A new version of the model's configuration; the old one ends when its last stream has ended."""
        config = {"backend": "llm", "parameters": {"max_queue_size": {"string_value": str(1000 + number)}}}
        path = f"/v2/repository/models/{MODEL}/load"
        status, text = await self.server.post(path, {"parameters": {"config": json.dumps(config)}})
        assert status == 200, text


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    model = mock(MODEL, block_size=8, num_kv_blocks=600, max_num_seqs=8, mock_step_ms=3, max_model_len=4096)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def begin() -> tuple[ServerUnderTest, Clients, httpx.AsyncClient]:
            server = await stack.enter_async_context(running(model))
            clients = await stack.enter_async_context(Clients(server.address.http, server.address.grpc))
            base_url = f"http://{server.address.http}"
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=base_url, limits=NO_KEEP_ALIVE, timeout=60, trust_env=False)
            )
            return server, clients, http

        try:
            yield Stage(runner, *runner.run(begin()))
        finally:
            runner.run(stack.aclose())


@dataclass
class Endless:
    """A request with an id of its own, too long to end by itself: it is stopped, or its client goes away."""

    request_id: str
    answer: asyncio.Task[httpx.Response]
    abandoned: bool = False


@dataclass
class Sent:
    streams: list[tuple[int, LiveStream]] = field(default_factory=list)
    endless: list[Endless] = field(default_factory=list)
    abandoned: set[LiveStream] = field(default_factory=set)


class ServerMachine(RuleBasedStateMachine):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.sent = Sent()
        self.faults: list[str] = []

    # --- what clients do ----------------------------------------------------------------------------------------------

    @initialize(indices=st.lists(st.integers(0, NUM_SPECS - 1), min_size=8, max_size=12))
    def begin(self, indices: list[int]) -> None:
        self._do(self._send(indices, 20))

    @rule(indices=st.lists(st.integers(0, NUM_SPECS - 1), min_size=2, max_size=8), pause_ms=st.sampled_from((0, 5, 50)))
    def send(self, indices: list[int], pause_ms: int) -> None:
        self._do(self._send(indices, pause_ms))

    async def _send(self, indices: list[int], pause_ms: int) -> None:
        for index in indices:
            self.sent.streams.append((index, self.stage.begin(self.stage.specs[index])))
        await asyncio.sleep(pause_ms * 1e-3)

    @precondition(lambda self: len(self.sent.endless) < MAX_ENDLESS)
    @rule()
    def send_endless(self) -> None:
        self._do(self._send_endless(f"endless-{len(self.sent.endless)}"))

    async def _send_endless(self, request_id: str) -> None:
        body = {"id": request_id, "text_input": "x", "sampling_parameters": '{"max_tokens": 4000, "ignore_eos": true}'}
        post = self.stage.http.post(f"/v2/models/{MODEL}/generate", json=body)
        self.sent.endless.append(Endless(request_id, asyncio.create_task(post)))
        await asyncio.sleep(0.02)

    @precondition(lambda self: self.sent.streams)
    @rule(which=st.integers(0, 100), pause_ms=st.sampled_from((0, 10)))
    def disconnect(self, which: int, pause_ms: int) -> None:
        """A client goes away, in any state of its request."""
        _, stream = self.sent.streams[which % len(self.sent.streams)]
        self.sent.abandoned.add(stream)
        stream.abandon()
        self._do(asyncio.sleep(pause_ms * 1e-3))

    @precondition(lambda self: self.sent.endless)
    @rule(which=st.integers(0, MAX_ENDLESS), goes_away=st.booleans())
    def end(self, which: int, goes_away: bool) -> None:
        endless = self.sent.endless[which % len(self.sent.endless)]
        if goes_away:
            endless.abandoned = True
            endless.answer.cancel()
        self._do(self._stop(endless))

    async def _stop(self, endless: Endless) -> None:
        """Stops it by its id, until the server knows no such request; it may be on its way still."""
        async with asyncio.timeout(STOP_S):
            while not endless.answer.done():
                await self.stage.http.post(f"/v2/models/{MODEL}/stop", json={"id": endless.request_id})
                await asyncio.sleep(0.02)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.faults) < MAX_FAULTS)
    @rule(with_fork_server=st.sampled_from((False, False, True)))
    def kill_engine(self, with_fork_server: bool) -> None:
        """The engine, which is the youngest process; or also the one that it was forked from."""
        self.faults.append("kill")
        self._do(self._tokens_came())
        pids = self.stage.server.engine_pids(MODEL)
        for pid in pids if with_fork_server else pids[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _tokens_came(self) -> None:
        """Waits until streams are under way, if there are any."""
        since_s, arrivals = time.monotonic(), self.stage.arrivals
        while arrivals.count_after(since_s) < 3 and time.monotonic() < since_s + 0.5:
            await asyncio.sleep(0.005)

    @precondition(lambda self: len(self.faults) < MAX_FAULTS)
    @rule(fault=st.sampled_from(("exception", "escape", "malformed", "out-of-memory", "nan-logits")))
    def fault_in_a_step(self, fault: str) -> None:
        self.faults.append(fault)
        (self.stage.server.fault_directory(MODEL) / fault).touch()

    @rule(number=st.integers(2, 9))
    def reload(self, number: int) -> None:
        self._do(self.stage.reload(number))

    @rule(pause_ms=st.sampled_from((5, 40, 150)))
    def wait(self, pause_ms: int) -> None:
        self._do(asyncio.sleep(pause_ms * 1e-3))

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        for fault in self.stage.server.fault_directory(MODEL).iterdir():
            fault.unlink(missing_ok=True)
        self._do(asyncio.gather(*(self._stop(endless) for endless in self.sent.endless)))
        runs = self._do(asyncio.gather(*(stream.ended() for _, stream in self.sent.streams)))
        failed = [self._judge(index, run) for (index, _), run in zip(self.sent.streams, runs, strict=True)]
        failed += [self._judge_endless(endless) for endless in self.sent.endless]
        assert not self._judge(0, self._do(self._next_request()))
        raised = sum(fault in ("exception", "out-of-memory") for fault in self.faults)
        excuses = self.faults.count("nan-logits") + max(len(self.faults) // 2, raised - 1)
        assert sum(failed) <= excuses, "more requests failed than faults can explain"
        self._expect_nothing_left()

    async def _next_request(self) -> Run:
        """Served as if nothing had been. It waits until the engine is back, and ends its series of deaths."""
        return await self.stage.begin(self.stage.specs[0]).ended()

    def _judge(self, index: int, run: Run) -> bool:
        """Whether it failed in a way that a fault may explain."""
        expected = self.stage.undisturbed[index]
        if run.abandoned:
            verdict = judge_prefix(expected, run.outcome)
        elif run.outcome.error is not None and _is_excused(run.outcome.error):
            assert judge_prefix(expected, run.outcome).is_clean
            return True
        else:
            verdict = judge(expected, run.outcome)
        assert verdict.is_clean, f"stream of spec {index}: {verdict}"
        return False

    @staticmethod
    def _judge_endless(endless: Endless) -> bool:
        if endless.abandoned:
            return False
        response = endless.answer.result()
        is_excused = _is_excused(response.text)
        assert is_excused or "cancelled" in response.text, f"{endless}: {response.status_code} {response.text}"
        return is_excused

    def _expect_nothing_left(self) -> None:
        server = self.stage.server
        assert self._do(server.still_busy(MODEL)) == ""
        self._until(lambda: len(self._children()) == self.stage.num_processes, "too many or too few processes")
        self._until(lambda: self.stage.process.num_fds() <= self.stage.num_descriptors, "descriptors were left")
        wait_for_self_check()
        for family in ("llmbackend:invariant_breaches_total", "llmbackend:core_invariant_breaches_total"):
            assert _samples(server, family) in ([], [0.0])
        assert json.loads(self._do(server.post("/v2/repository/index"))[1])[0]["state"] == "READY"

    def _children(self) -> list[psutil.Process]:
        return list(self.stage.process.children(recursive=True))

    def _until(self, condition: Any, complaint: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, complaint
            self._do(asyncio.sleep(0.02))

    def _do(self, work: Any) -> Any:
        async def doing() -> Any:
            return await work

        return self.stage.run(doing())


def _is_excused(error: str) -> bool:
    """A request under which an engine died again and again, or that a fault met on its own."""
    return any(reason in error for reason in (BLAMED, BROKEN_LOGITS, STRUCK_ALONE))


def _samples(server: ServerUnderTest, family: str) -> list[float]:
    text = httpx.get(f"http://{server.address.metrics}/metrics", trust_env=False).text
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(family)]


def test_the_whole_server_loses_nothing(stage: Stage) -> None:
    machine: Any = partial(ServerMachine, stage)
    run_state_machine_as_test(machine, settings=machine_settings(examples=4, steps=10))
