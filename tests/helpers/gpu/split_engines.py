"""Engines of several processes, as tests see them: started, given requests, and killed.

Used by tests of models that are split over ranks. Independent of which models and how ranks are started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import LOST_RANK_EXIT_CODE, EngineDeadError
from llmbackend.engine.messages import EngineInput, InferRequest, SamplingParams
from llmbackend.engine.process.transport import EngineForkServer, ProcessTransport
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers.gpu.gpu_engines import gpu_runner

Tokens = Mapping[str, tuple[int, ...]]


def config_for(path: Path, **options: Any) -> EngineConfig:
    limits = {"max_num_seqs": 6, "block_size": 8, "num_kv_blocks": 60, "max_num_batched_tokens": 48, "num_threads": 1}
    limits |= {"step_target_ms": 0}  # the same batches each time
    return EngineConfig(model=str(path), **limits | options)


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


def await_death(engine: ProcessTransport, lost: str = "rank 1") -> dict[str, tuple[int, ...]]:
    """What came before it. lost: the rank that ends the engine, by the name that its error has."""
    tokens: dict[str, tuple[int, ...]] = {}
    with pytest.raises(EngineDeadError) as caught:
        while True:
            tokens = extended(tokens, collect(engine, 1))
    ending = f"the engine process ended with exit code {LOST_RANK_EXIT_CODE}"
    assert str(caught.value) == f"{ending}: {lost} was lost: this engine ends"
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


def alone(path: Path, requests: list[InferRequest], **options: Any) -> Tokens:
    """On one device, in this process."""
    config = config_for(path, transport="inline", **options)
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
