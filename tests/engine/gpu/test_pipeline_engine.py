"""An engine in stages, and one whose ranks others start: the tokens of one process, and a lost rank costs none.

The ranks are real processes on CPU, joined by torch.distributed's gloo.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.gpu.parallel.rank_process import RankKeeper
from llmbackend.engine.llm_manager import RUNNERS
from llmbackend.engine.messages import EngineInput, InferRequest
from llmbackend.engine.process.transport import EngineForkServer, ProcessTransport
from llmbackend.engine.rank_order import RankMeeting, RankOrder
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers.gpu.gpu_engines import gpu_runner, mixed_requests, tokens_of
from tests.helpers.gpu.split_engines import (
    Tokens,
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
from tests.helpers.waiting import eventually

FEW_BLOCKS = {"num_kv_blocks": 16}
"""Requests are preempted."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    save(FAMILIES["llama tied"], path, torch.bfloat16)
    return path


@contextmanager
def engines(config: EngineConfig, meeting: RankMeeting | None = None) -> Iterator[Callable[[], ProcessTransport]]:
    """Starts engines of the config, one after the other."""
    started: list[ProcessTransport] = []
    wakeup = Wakeup()
    fork_server = EngineForkServer(config, RUNNERS, meeting)

    def start_next() -> ProcessTransport:
        if started:
            started.pop().close()
        started.append(start(fork_server, wakeup))
        return started[0]

    try:
        yield start_next
    finally:
        for engine in started:
            engine.close()
        fork_server.close()
        wakeup.close()


def test_two_stages_give_the_tokens_of_one_process_and_leave_nothing(model: Path) -> None:
    """In bfloat16, bit for bit: over shared prefixes, chunks, preemptions, logprobs and every way to sample."""
    requests = mixed_requests(14, seed=4)
    with engines(config_for(model, pipeline_parallel_size=2, **FEW_BLOCKS)) as start_next:
        engine = start_next()
        tokens = run(engine, requests)
        pid, [follower] = pid_of(engine), children_of(pid_of(engine))
    assert is_gone(pid) and is_gone(follower)
    config = config_for(model, transport="inline", **FEW_BLOCKS)
    expected, preemptions = tokens_of(config, gpu_runner(config), requests)
    assert preemptions and tokens == {name: tuple(ids) for name, ids in expected.items()}


def test_two_stages_of_two_ranks_each(model: Path) -> None:
    requests = mixed_requests(8, seed=5)
    with engines(config_for(model, pipeline_parallel_size=2, tensor_parallel_size=2)) as start_next:
        assert run(start_next(), requests) == alone(model, requests)


def free_meeting() -> RankMeeting:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return RankMeeting("127.0.0.1", port, "k" * 32)


@contextmanager
def keeper(config: EngineConfig, meeting: RankMeeting) -> Iterator[RankKeeper]:
    keeper = RankKeeper(RankOrder(config, 1, meeting))
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.close()


def test_ranks_that_others_start_are_met_lost_and_met_again(model: Path) -> None:
    """First the other rank is killed under streams, and then rank 0."""
    requests = [long_request(f"{i}") for i in range(4)]
    expected = alone(model, requests)
    config, meeting = config_for(model, pipeline_parallel_size=2), free_meeting()
    with keeper(config, meeting) as rank, engines(config, meeting) as start_next:
        engine = start_next()
        engine.send(EngineInput(add=tuple(requests)))
        so_far = {request.request_id: () for request in requests} | collect(engine, 3)
        first, name = rank.pid, f"rank 1 on {socket.gethostname()} (127.0.0.1)"
        assert first is not None
        os.kill(first, signal.SIGKILL)
        so_far = extended(so_far, await_death(engine, name))
        assert any(so_far.values()) and so_far != expected
        engine = start_next()
        second = rank.pid
        assert second is not None and second != first
        engine.send(EngineInput(add=tuple(resumed(requests, so_far))))
        so_far = extended(so_far, collect(engine, 2))
        os.kill(pid_of(engine), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            while True:
                so_far = extended(so_far, collect(engine, 1))
        eventually(lambda: is_gone(second))
        assert extended(so_far, run(start_next(), resumed(requests, so_far))) == expected
        third = rank.pid
    assert third is not None and is_gone(third)


def resumed(requests: list[InferRequest], so_far: Tokens) -> list[InferRequest]:
    return [msgspec.structs.replace(one, output_token_ids=so_far[one.request_id]) for one in requests]
