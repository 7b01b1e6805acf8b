"""Which failures of engines a supervisor counts, and when it stops one that is not used: with engines that do what the
test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.load_progress import LoadProgress
from llmbackend.engine.messages import EngineInput, EngineStarted, EngineStats, StepResult
from llmbackend.engine.process import supervisor as supervisor_module
from llmbackend.engine.process.engine_link import Transport
from llmbackend.engine.process.supervisor import Supervisor
from llmbackend.fork_server import client
from llmbackend.testing.mock_model import MockRunner
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers.fake_clock import FakeClock

Script = deque[list[StepResult] | Exception]
REPORT = StepResult(1, (), EngineStats())
"""Of an engine that computed nothing."""
STEP = StepResult(1, (), EngineStats(last_step_s=0.01))
UNREACHED = EngineDeadError("it cannot be reached", "disconnect")
CUT = EngineDeadError("the connection has ended", "disconnect")
KILLED = EngineDeadError("it was killed", "killed")
NO_LINK = ValueError("there can be no link to an engine")


class ScriptedEngine(Transport):
    """Does what comes next in the script. One that can be reached has loaded its model."""

    def __init__(self, config: EngineConfig, script: Script, progress: Callable[[LoadProgress], None]) -> None:
        super().__init__(config, progress)
        self._script = script

    def launch(self) -> None:
        if self._script[0] is UNREACHED:
            self._script.popleft()
            raise UNREACHED

    def _receive_started(self, timeout_s: float | None) -> Sequence[EngineStarted]:
        return [EngineStarted(info=MockRunner(self._config).info)]

    def receive(self, timeout_s: float | None = None) -> list[StepResult]:
        said = self._script.popleft()
        if isinstance(said, Exception):
            raise said
        return said

    def send(self, message: EngineInput) -> None:
        """Nobody reads it."""

    def close(self, *, force: bool = False) -> None:
        """There is nothing to free."""


class ScriptedSource:
    def __init__(self, config: EngineConfig, script: Script) -> None:
        self._config = config
        self._script = script

    def make_transport(self, wake_fd: int, progress: Callable[[LoadProgress], None]) -> Transport:
        if self._script[0] is NO_LINK:
            self._script.popleft()
            raise NO_LINK
        return ScriptedEngine(self._config, self._script, progress)

    def load_whole(self) -> bool:
        return False

    def close(self) -> None:
        """There is nothing to free."""


MakeSupervisor = Callable[..., Supervisor]


@pytest.fixture
def make_supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSupervisor]:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.0)
    wakeup = Wakeup()

    def make(*script: list[StepResult] | Exception, **arguments: Any) -> Supervisor:
        config = EngineConfig(model="mock", **arguments)
        return Supervisor(config, ScriptedSource(config, deque(script)), wakeup)

    yield make
    wakeup.close()


def lose(supervisor: Supervisor) -> bool:
    """Goes on until the next engine is lost; whether requests no longer wait for one."""
    with pytest.raises(EngineDeadError):
        while True:
            supervisor.receive(is_busy=False)
    return supervisor.is_given_up


def test_only_a_step_that_computed_something_ends_a_row_of_failures(make_supervisor: MakeSupervisor) -> None:
    script = [KILLED, [REPORT], KILLED, [REPORT, STEP], KILLED, [REPORT], KILLED, [REPORT], KILLED]
    supervisor = make_supervisor(*script, max_engine_failures=3)
    assert [lose(supervisor) for _ in range(5)] == [False, False, False, False, True]


def test_an_engine_to_which_there_is_no_link_is_a_failure(make_supervisor: MakeSupervisor) -> None:
    supervisor, given_up = make_supervisor(NO_LINK, NO_LINK, max_engine_failures=2), []
    for _ in range(2):
        with pytest.raises(ValueError, match="no link"):
            supervisor.receive(is_busy=False)
        supervisor.discard("the loop failed")
        given_up.append(supervisor.is_given_up)
    assert given_up == [False, True]


def test_lost_connections_count_until_an_engine_is_reached(make_supervisor: MakeSupervisor) -> None:
    """A request that kills a remote engine is found: no other ends because of it."""
    script = [UNREACHED, UNREACHED, *[CUT] * 9, UNREACHED, UNREACHED]
    supervisor = make_supervisor(*script, max_engine_failures=3)
    assert [lose(supervisor) for _ in script] == [False] * 12 + [True]
    with pytest.raises(RuntimeError, match="failed 3 times in a row, the last time: it cannot be reached"):
        supervisor.check_ready(1, 60.0)


def test_an_engine_that_does_something_is_not_stopped(
    make_supervisor: MakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, it reads an adapter."""
    clock = FakeClock()
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=clock))
    supervisor, began_s = make_supervisor([REPORT], idle_unload_s=10.0), clock.now_s
    while supervisor.info is None:
        supervisor.receive(is_busy=False)
    clock.now_s += 6.0
    assert supervisor.receive(is_busy=False) == [REPORT]
    while not supervisor.sleep_if_unused():
        clock.now_s += 1.0
    assert supervisor.is_asleep and clock.now_s - began_s == 16.0
