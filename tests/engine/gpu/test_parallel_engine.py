"""An engine over two processes: the tokens of one, no process left behind, and a new engine when either dies.

The ranks are real: forked from the engine's process, joined by torch.distributed's gloo, on CPU.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.gpu.parallel.followers import LOST_EXIT_CODE
from llmbackend.engine.infer_request import EngineInput, InferRequest, SamplingParams
from llmbackend.engine.llm_manager import RUNNERS
from llmbackend.engine.process.supervisor import Wakeup
from llmbackend.engine.process.transport import EngineForkServer, ProcessTransport
from tests.helpers.gpu.gpu_engines import gpu_runner, mixed_requests
from tests.helpers.gpu.tiny_models import FAMILIES, save

Tokens = Mapping[str, tuple[int, ...]]


def config_for(path: Path, **options: Any) -> EngineConfig:
    limits = {"max_num_seqs": 6, "block_size": 8, "num_kv_blocks": 60, "max_num_batched_tokens": 48, "num_threads": 1}
    return EngineConfig(model=str(path), **limits | options)


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


def start(fork_server: EngineForkServer, wakeup: Wakeup) -> ProcessTransport:
    engine = ProcessTransport(fork_server, wakeup.fileno())
    engine.launch()
    try:
        while engine.receive_started(None) is None:
            pass
    except EngineDeadError:
        engine.close()
        raise
    return engine


def pid_of(engine: ProcessTransport) -> int:
    assert engine._process is not None
    return engine._process.pid


def children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_gone(pid: int) -> bool:
    """Also one that has ended and has not been waited for."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def collect(engine: ProcessTransport, num_results: int) -> dict[str, tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = {}
    while num_results > 0:
        results = engine.receive(20)
        assert results, "no result came"
        num_results -= len(results)
        for output in (output for result in results for output in result.outputs):
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
    return tokens


def await_death(engine: ProcessTransport) -> dict[str, tuple[int, ...]]:
    """What came before it."""
    tokens: dict[str, tuple[int, ...]] = {}
    with pytest.raises(EngineDeadError) as caught:
        while True:
            tokens = extended(tokens, collect(engine, 1))
    assert str(caught.value) == f"the engine process ended with exit code {LOST_EXIT_CODE}"
    return tokens


def extended(tokens: Tokens, more: Tokens) -> dict[str, tuple[int, ...]]:
    return {name: tokens.get(name, ()) + more.get(name, ()) for name in tokens.keys() | more.keys()}


def run(engine: ProcessTransport, requests: list[InferRequest]) -> Tokens:
    engine.send(EngineInput(add=tuple(requests)))
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    live = set(tokens)
    while live:
        for result in engine.receive(20):
            for output in result.outputs:
                assert not output.error, output.error
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    live.discard(output.request_id)
    return tokens


def alone(path: Path, requests: list[InferRequest]) -> Tokens:
    """On one device, in this process."""
    config = config_for(path, transport="inline")
    core = EngineCore(config, gpu_runner(config))
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
    core.close()
    return tokens


def long_request(name: str) -> InferRequest:
    sampling = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    return InferRequest(request_id=name, prompt_token_ids=(3, 5, 8), sampling=sampling)


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


def test_an_engine_that_is_killed_takes_its_followers_with_it(engine: ProcessTransport) -> None:
    [follower] = children_of(pid_of(engine))
    with open(os.pidfd_open(follower)) as end:
        os.kill(pid_of(engine), signal.SIGKILL)
        assert select.select([end], [], [], 10)[0] and is_gone(follower)
