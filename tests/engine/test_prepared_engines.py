"""Engines that share what another process prepared before them: every way in which this can end, under a supervisor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.messages import EngineInput
from llmbackend.engine.process.supervisor import FORK_SERVERS, ForkedEngines, Supervisor
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers import preparing_runners
from tests.helpers.mock_engine import Outcomes, expect_oracle, make_request
from tests.helpers.supervised_engines import load, pid_of, server_pid_of
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def make_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))  # for `tests` in an engine's process
    made = []

    def make(load_timeout_s: float = 1800.0) -> Supervisor:
        config = EngineConfig(model="mock", fault_directory=str(tmp_path), load_timeout_s=load_timeout_s)
        wakeup = Wakeup()
        supervisor = Supervisor(config, ForkedEngines(config, preparing_runners.__name__), wakeup)
        made.append((supervisor, wakeup))
        return supervisor

    yield make
    for supervisor, wakeup in made:
        supervisor.close()
        wakeup.close()


def forks(directory: Path) -> list[str]:
    return (directory / "forks").read_text().split()


def lose(supervisor: Supervisor) -> EngineDeadError:
    with pytest.raises(EngineDeadError) as caught:
        while True:
            supervisor.receive(is_busy=False)
    return caught.value


def expect_tokens(supervisor: Supervisor) -> None:
    request, outcomes = make_request("r"), Outcomes()
    supervisor.send(EngineInput((request,)))
    while outcomes["r"].finish_reason is None:
        for result in supervisor.receive(is_busy=True):
            outcomes.add(result)
    expect_oracle(outcomes["r"], request)


def test_the_first_process_prepares_and_the_second_is_the_engine(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = make_supervisor()
    load(supervisor)
    assert forks(tmp_path) == ["False", "True"]
    expect_tokens(supervisor)
    os.kill(pid_of(supervisor), signal.SIGKILL)
    assert lose(supervisor).kind == "killed"
    load(supervisor)
    expect_tokens(supervisor)
    assert forks(tmp_path) == ["False", "True", "True"], "what was prepared is there for the next one"
    assert "in a row" in caplog.text and "killing an engine" not in caplog.text


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("preparing-killed", "killed", "ended by signal SIGKILL"),
        ("preparing-error", "load", "the checkpoint is broken"),
    ],
)
def test_a_process_that_fails_to_prepare_is_a_dead_engine(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path, fault: str, kind: str, text: str
) -> None:
    (tmp_path / fault).touch()
    supervisor = make_supervisor()
    error = lose(supervisor)
    assert error.kind == kind and text in str(error)
    load(supervisor)
    expect_tokens(supervisor)


def test_one_that_hangs_while_it_prepares_is_ended_in_time(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path
) -> None:
    (tmp_path / "preparing-hang").touch()
    supervisor = make_supervisor(load_timeout_s=2.0)
    error = lose(supervisor)
    assert error.kind == "hang" and "did not load within 2 s" in str(error)
    load(supervisor)
    expect_tokens(supervisor)


def test_where_what_was_prepared_is_gone_each_time_engines_load_by_themselves(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vanish").touch()
    supervisor = make_supervisor()
    load(supervisor)
    expect_tokens(supervisor)
    assert forks(tmp_path) == ["False", "False", "whole"]
    assert "keep disappearing" in caplog.text


def test_a_fork_server_that_is_killed_while_its_child_prepares(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path
) -> None:
    (tmp_path / "preparing-hang").touch()
    supervisor = make_supervisor(load_timeout_s=20.0)
    supervisor.receive(is_busy=False)
    eventually(lambda: not (tmp_path / "preparing-hang").exists())
    preparer = pid_of(supervisor)
    os.kill(server_pid_of(supervisor), signal.SIGKILL)
    os.kill(preparer, signal.SIGKILL)
    assert lose(supervisor).kind == "killed"
    load(supervisor)
    expect_tokens(supervisor)


@pytest.mark.parametrize(("load_timeout_s", "kind"), [(30.0, "killed"), (2.0, "hang")])
def test_a_fork_server_that_hangs_or_dies_before_it_forks(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path, load_timeout_s: float, kind: str
) -> None:
    (tmp_path / "fork-server-hang").touch()
    supervisor = make_supervisor(load_timeout_s=load_timeout_s)
    supervisor.receive(is_busy=False)
    eventually(lambda: not (tmp_path / "fork-server-hang").exists())
    first_pid = server_pid_of(supervisor)
    if kind == "killed":
        os.kill(first_pid, signal.SIGKILL)
    assert lose(supervisor).kind == kind
    load(supervisor)
    expect_tokens(supervisor)
    assert server_pid_of(supervisor) != first_pid and not psutil.pid_exists(first_pid)


def test_engines_of_one_config_come_from_one_fork_server(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path
) -> None:
    first, second = make_supervisor(), make_supervisor()
    load(first)
    load(second)
    assert server_pid_of(first) == server_pid_of(second)
    assert forks(tmp_path) == ["False", "True", "True"]
    assert psutil.Process(pid_of(first)).ppid() == psutil.Process(pid_of(second)).ppid() == server_pid_of(first)
    first.close()
    expect_tokens(second)
    server_pid = server_pid_of(second)
    second.close()
    assert not psutil.pid_exists(server_pid) and not FORK_SERVERS._shared


def test_an_engine_whose_start_ends_in_the_middle_leaves_its_neighbours(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path
) -> None:
    first = make_supervisor()
    load(first)
    (tmp_path / "prepared").unlink()
    (tmp_path / "preparing-hang").touch()
    second = make_supervisor()
    deadline_s = time.monotonic() + 20
    while (tmp_path / "preparing-hang").exists() and time.monotonic() < deadline_s:
        second._wakeup.set()
        second.receive(is_busy=False)
    second.close()
    expect_tokens(first)
