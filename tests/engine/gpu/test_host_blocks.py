"""KV blocks between device and host memory on the accelerator path, and its steps that overlap, through the core.

The fake device does its work as late as it can, so that a copy or a step that reads the host's memory late shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.gpu import device_kv_memory
from llmbackend.engine.gpu.device_kv_memory import HostBlocks
from llmbackend.engine.gpu.kernels.fused import BlockMoves
from llmbackend.engine.gpu.ops.ops import LayerCache
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.module_runner import make_model_runner
from llmbackend.engine.step import KVCopies
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import GreedyOnDevice, config_for, gpu_runner, mixed_requests, tokens_of
from tests.helpers.gpu.kernel_device import DEVICE

FAMILY = "qwen2"


def greedy(requests: list[InferRequest]) -> list[InferRequest]:
    """What GreedyOnDevice can sample: no penalties, no logprobs."""
    return [
        InferRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=SamplingParams(max_tokens=request.sampling.max_tokens, temperature=0.0),
        )
        for request in requests
    ]


@pytest.mark.parametrize("num_host_kv_blocks", [0, 3, 40])
@pytest.mark.parametrize("overlaps", [False, True])
def test_tokens_are_those_of_the_cpu_path(model: Path, overlaps: bool, num_host_kv_blocks: int) -> None:
    requests = greedy(mixed_requests(9, seed=3))
    expected, _ = tokens_of(config_for(model), make_model_runner(config_for(model)), requests)
    config = config_for(
        model,
        num_kv_blocks=14,
        max_num_batched_tokens=24,
        num_host_kv_blocks=num_host_kv_blocks,
        async_scheduling=overlaps,
        step_target_ms=0,  # a plan by the clock may preempt nothing on a busy machine
    )
    tokens, preemptions = tokens_of(config, gpu_runner(config, sampling=GreedyOnDevice()), requests)
    assert tokens == expected
    assert preemptions > 0


def test_what_the_device_has_no_room_for_is_copied_back(model: Path) -> None:
    config = config_for(model, num_kv_blocks=14, num_host_kv_blocks=40)
    runner = gpu_runner(config)
    assert runner.info.num_host_blocks == 40
    core = EngineCore(config, runner)
    found = []
    for i in (0, 1, 2, 0):
        core.add(InferRequest(request_id="r", prompt_token_ids=tuple(range(i, i + 41)), sampling=SamplingParams()))
        while core.has_work:
            result = core.step()
            found += [output.num_cached_tokens for output in result.outputs if output.finish_reason]
    assert found == [0, 0, 0, 40]
    assert result.stats.num_reloaded_blocks > 0
    core.check()
    core.close()


def test_what_moves_blocks_has_run_when_the_engine_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its kernels are compiled then, so that no request waits for that."""
    device, moves_of, of_buffers = FakeDevice(), device_kv_memory._moves, list[mock.Mock]()

    def watched(*arguments: Any) -> mock.Mock:
        of_buffers.append(mock.Mock(wraps=moves_of(*arguments)))
        return of_buffers[-1]

    monkeypatch.setattr(device_kv_memory, "_moves", watched)
    runner = gpu_runner(config_for(model, num_host_kv_blocks=3), device)
    device.synchronize()
    assert any(moves.gather.called for moves in of_buffers) and any(moves.spread.called for moves in of_buffers)
    runner.close()


@pytest.mark.parametrize("copies_hurry", [False, True])
@pytest.mark.parametrize("staging_bytes", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_go_there_and_back_bit_by_bit(
    dtype: torch.dtype, staging_bytes: int, copies_hurry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several chunks of host memory, late, and in the order in which they were asked for, also where a buffer
    holds one block."""
    monkeypatch.setattr(device_kv_memory, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(device_kv_memory, "STAGING_BYTES", staging_bytes)
    device = FakeDevice()
    torch.manual_seed(0)

    def memory(heads: int, dim: int) -> torch.Tensor:
        return torch.randint(0, 200, (6, heads, 4, dim)).to(dtype)

    caches = [LayerCache(memory(heads, 8), memory(heads, 6)) for heads in (2, 1)]
    before = [(cache.keys.clone(), cache.values.clone()) for cache in caches]
    host = HostBlocks(device, caches, 9)
    host.copy(_copies(True, [0, 1, 5, 3], [8, 0, 4, 6]))
    host.copy(_copies(False, [2, 0, 4, 3], [8, 4, 6, 0]))
    assert torch.equal(caches[0].keys, before[0][0]), "nothing runs before it is waited for"
    if copies_hurry:
        device.hurry_copies()
    device.synchronize()
    for cache, (keys, values) in zip(caches, before, strict=True):
        for part, old in ((cache.keys, keys), (cache.values, values)):
            assert torch.equal(part, old[[5, 1, 0, 1, 3, 5]])


def test_neighbours_on_the_host_are_one_copy_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = mock.Mock(side_effect=device_kv_memory._copy)
    monkeypatch.setattr(device_kv_memory, "_copy", copied)
    device, caches = FakeDevice(), [LayerCache(*torch.zeros(2, 12, 1, 16, 4)) for _ in range(3)]
    host = HostBlocks(device, caches, 12)
    host.copy(_copies(True, [3, 1, 7, 5, 0], [4, 6, 5, 9, 10]))
    device.enqueue(lambda: None)
    device.record().wait()
    assert not copied.called, "later steps do not wait for it"
    device.synchronize()
    (pairs,) = copied.call_args.args
    assert [len(target) for target, _ in pairs] == [3, 2]


def test_blocks_move_by_a_kernel_as_they_do_without() -> None:
    draw = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 256, (7, size), generator=draw, dtype=torch.uint8).to(DEVICE) for size in (48, 8200, 16)]
    ends = [0, 48, 8248, 8264]
    staged = torch.zeros((4, 8264), dtype=torch.uint8, device=DEVICE)
    moves = BlockMoves(parts, ends, staged)
    moves.gather((5, 0, 2))
    assert torch.equal(staged[:3], torch.cat([part[[5, 0, 2]] for part in parts], dim=1)) and not staged[3].any()
    before = [part.clone() for part in parts]
    moves.spread((1, 3, 6))
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part, old[[0, 5, 2, 0, 4, 5, 2]])


def _copies(to_host: bool, blocks: list[int], host_blocks: list[int]) -> KVCopies:
    return KVCopies(to_host, np.array(blocks, np.int32), np.array(host_blocks, np.int32))
