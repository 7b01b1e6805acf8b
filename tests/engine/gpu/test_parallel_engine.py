"""An engine over two processes: the tokens of one, no process left behind, and a new engine when either dies.

The ranks are real: forked from the engine's process, joined by torch.distributed's gloo, on CPU.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from llmbackend.engine.llm_manager import RUNNERS
from llmbackend.engine.messages import EngineInput
from llmbackend.engine.process.transport import EngineForkServer, ProcessTransport
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers.gpu.gpu_engines import mixed_requests
from tests.helpers.gpu.split_engines import (
    alone,
    await_death,
    children_of,
    collect,
    config_for,
    extended,
    is_gone,
    long_request,
    pid_of,
    run,
    start,
)
from tests.helpers.gpu.tiny_models import FAMILIES, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("qwen2")
    save(FAMILIES["qwen2"], path)
    return path


@pytest.fixture(scope="module")
def wakeup() -> Iterator[Wakeup]:
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()


@pytest.fixture(scope="module")
def fork_server(model: Path) -> Iterator[EngineForkServer]:
    fork_server = EngineForkServer(config_for(model, tensor_parallel_size=2), RUNNERS)
    yield fork_server
    fork_server.close()


@pytest.fixture(scope="module")
def first(fork_server: EngineForkServer, wakeup: Wakeup) -> Iterator[list[ProcessTransport]]:
    """An engine, and with it the fork_server's process, that is there before the first test begins, which takes it."""
    engines = [start(fork_server, wakeup)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(first: list[ProcessTransport], fork_server: EngineForkServer, wakeup: Wakeup) -> Iterator[ProcessTransport]:
    engine = first.pop() if first else start(fork_server, wakeup)
    yield engine
    engine.close()


def test_two_ranks_give_the_tokens_of_one_and_leave_nothing(engine: ProcessTransport, model: Path) -> None:
    requests = mixed_requests(14, seed=4)
    assert run(engine, requests) == alone(model, requests)
    pid = pid_of(engine)
    [follower] = children_of(pid)
    engine.close()
    assert is_gone(pid) and is_gone(follower)


def test_a_follower_that_dies_ends_the_engine_and_the_next_one_goes_on(
    engine: ProcessTransport, fork_server: EngineForkServer, wakeup: Wakeup, model: Path
) -> None:
    """First in the midst of steps, then while nothing is computed."""
    requests = [long_request(f"{i}") for i in range(5)]
    expected = alone(model, requests)
    pid, [follower] = pid_of(engine), children_of(pid_of(engine))
    engine.send(EngineInput(add=tuple(requests)))
    so_far = {request.request_id: () for request in requests} | collect(engine, 3)
    os.kill(follower, signal.SIGKILL)
    so_far = extended(so_far, await_death(engine))
    assert is_gone(pid) and is_gone(follower)
    engine.close()
    assert any(so_far.values()) and so_far != expected
    engine = start(fork_server, wakeup)
    try:
        resumed = [msgspec.structs.replace(one, output_token_ids=so_far[one.request_id]) for one in requests]
        assert extended(so_far, run(engine, resumed)) == expected
        os.kill(children_of(pid_of(engine))[0], signal.SIGKILL)
        assert not await_death(engine)
    finally:
        engine.close()


def test_the_bench_forks_the_ranks_of_its_engine_itself(model: Path, tmp_path: Path) -> None:
    (tmp_path / "workload.json").write_text(json.dumps([{"prompt_tokens": 5, "output_tokens": 3}] * 2))
    arguments = {"tensor_parallel_size": 2, "num_threads": 1, "num_kv_blocks": 60, "block_size": 8}
    command = [sys.executable, "-m", "llmbackend.cli", "bench", "--model", str(model)]
    command += ["--workload", str(tmp_path / "workload.json"), "--json", str(tmp_path / "figures.json")]
    subprocess.run([*command, "--engine-args", json.dumps(arguments)], check=True, stdout=subprocess.DEVNULL)
    assert json.loads((tmp_path / "figures.json").read_text())["output_tokens"] == 6


def test_an_engine_that_is_killed_takes_its_followers_with_it(engine: ProcessTransport) -> None:
    [follower] = children_of(pid_of(engine))
    with open(os.pidfd_open(follower)) as end:
        os.kill(pid_of(engine), signal.SIGKILL)
        assert select.select([end], [], [], 10)[0] and is_gone(follower)
