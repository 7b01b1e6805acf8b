"""The real host, adapter, managers and engine cores; the test replaces their threads, sockets and clocks.

Used by state machines that choose every interleaving themselves, so that a failure is a short program that always
fails. What is replaced: a manager's thread (the test calls `turn`), the socket and the process behind it (the test
calls `step`, or `kill`), and the deadlines' clock (the test calls `expire`). Everything else is production code.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from llmbackend.adapter import model_instance_state, model_state
from llmbackend.adapter.model_state import ModelState
from llmbackend.adapter.tasks.infer_task import InferTask
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.llm_manager import LlmManager
from llmbackend.engine.messages import EngineInput, ModelInfo, StepResult
from llmbackend.engine.process import engine_process, supervisor
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from llmbackend.fork_server import client
from llmbackend.testing.mock_model import MockRunner
from llmbackend.waiting.timer import Timer
from tests.helpers import llm_requests
from tests.helpers.core_host import version_of
from tests.helpers.llm_host import MODEL, Call, LlmHost, write_model

_encode = msgspec.msgpack.Encoder().encode
_decode_result = msgspec.msgpack.Decoder(StepResult).decode


class PoisonousRunner(MockRunner):
    """Dies of a request whose prompt has the poison token."""

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        if any(llm_requests.POISON in self._requests[row].prompt_token_ids for row in plan.rows.tolist()):
            raise SystemExit
        return super().execute(plan, table)


class Inbox:
    """The engine's end of its socket: messages wait here until the engine takes them."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()

    def recv(self, flags: int = 0) -> bytes:
        if not self._messages:
            raise zmq.Again
        return self._messages.popleft()

    def send(self, data: bytes, flags: int = 0) -> None:
        self._messages.append(data)

    def poll(self, timeout: int) -> int:
        return len(self._messages)


class SteppedTransport:
    """An engine that runs when it is told to, and dies when it is told to."""

    def __init__(self, world: World, config: EngineConfig) -> None:
        self._world = world
        self._inbox = Inbox()
        self._outbox: deque[bytes] = deque()
        self._is_dead = False
        self.core = EngineCore(config, PoisonousRunner(config))

    # --- what the test does ---

    def step(self) -> None:
        """Takes in what was sent, and computes a step if there is work."""
        if self._is_dead:
            return
        try:
            engine_process._take_inputs(self.core, self._inbox)
            if self.core.has_work:
                self._outbox.append(_encode(self.core.step()))
        except SystemExit:
            self.kill(drop_results=False)
        self.core.check()

    def kill(self, drop_results: bool) -> None:
        """`drop_results`: what it had sent and was not received yet is lost with it."""
        self._is_dead = True
        if drop_results:
            self._outbox.clear()

    # --- what the supervisor does ---

    pid = None
    num_requests_of_others = 0
    knows_vocabulary = False

    def launch(self) -> None:
        self._is_dead = self._world.take_load_failure()

    def receive_started(self, timeout_s: float | None) -> ModelInfo | None:
        self._raise_if_dead()
        return self.core.info

    def receive(self, timeout_s: float | None = None) -> list[StepResult]:
        results = [_decode_result(message) for message in self._outbox]
        self._outbox.clear()
        if not results:
            self._raise_if_dead()
        return results

    def send(self, message: EngineInput) -> None:
        self._raise_if_dead()
        self._inbox.send(_encode(message))

    def close(self, *, force: bool = False) -> None:
        self._is_dead = True
        self.core.check()
        self.core.close()

    def _raise_if_dead(self) -> None:
        if self._is_dead:
            raise EngineDeadError("the test killed the engine", "signal")


class HandTurnedManager(LlmManager):
    """A manager whose loop goes round when it is told to."""

    num_deaths = 0

    def start(self, meanwhile: Callable[[], object] = lambda: None) -> ModelInfo:
        meanwhile()
        while not self._first_load.done():
            self.turn()
        return self._first_load.result()

    def turn(self) -> None:
        """As `_run`, but what is no engine's death fails the test."""
        try:
            self._turn()
        except EngineDeadError as error:
            self.num_deaths += 1
            self._lose_engine(error)

    def shutdown(self) -> None:
        self._stopping = True
        self._run()
        self._wakeup.close()

    @property
    def transport(self) -> SteppedTransport | None:
        """None between two lives."""
        transport = self._supervisor._transport
        assert transport is None or isinstance(transport, SteppedTransport)
        return transport


class ManualTimer(Timer):
    """Alarms that are due when the test says so: it never runs."""

    def start(self) -> None:
        pass


class World:
    """One host with one model, whose engines stand still until the test moves them."""

    def __init__(self, pbtxt: str, **engine: Any) -> None:
        self.load_failures_left = 0
        self._submitted: list[InferTask] = []
        self._arrived = threading.Event()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(model_instance_state, "LlmManager", HandTurnedManager)
        self._patch.setattr(model_state, "Timer", ManualTimer)
        self._patch.setattr(
            supervisor, "make_transport", lambda fork_server, *_: SteppedTransport(self, fork_server.config)
        )
        self._patch.setattr(client, "FIRST_PAUSE_S", 0.0)
        self._patch.setattr(ModelState, "submit", self._submit_of(ModelState.submit))
        self._directory = tempfile.TemporaryDirectory()
        repository = Path(self._directory.name)
        write_model(repository, pbtxt, **engine)
        self.server = InferenceServer(ServerOptions(model_repositories=(repository,), model_control_mode="none"))
        self.server.start()
        self.host = LlmHost(self.server)
        state = version_of(self.server, MODEL).state
        assert isinstance(state, ModelState)
        self.state = state
        # Instances load side by side: the first manager is that of the engine which the state lists first.
        self.managers = [engine.manager for engine in state._engines if isinstance(engine.manager, HandTurnedManager)]

    def take_load_failure(self) -> bool:
        self.load_failures_left -= 1
        return self.load_failures_left >= 0

    def start(self, kind: int, **options: Any) -> tuple[Call, InferTask | None]:
        """Sends a request and waits until the backend has queued or refused it; its task, if one was made."""
        call = llm_requests.start(self.host, kind, on_final=self._arrived.set, **options)
        while not (self._submitted or call.num_finals):
            assert self._arrived.wait(20), "the request did not reach the backend"
            self._arrived.clear()
        return call, self._submitted.pop() if self._submitted else None

    def close(self) -> None:
        assert self.server.stop(20)
        self._patch.undo()
        self._directory.cleanup()

    def _submit_of(self, submit: Any) -> Any:
        def noting(state: ModelState, tasks: Sequence[InferTask]) -> None:
            submit(state, tasks)
            self._submitted.extend(tasks)
            self._arrived.set()

        return noting
