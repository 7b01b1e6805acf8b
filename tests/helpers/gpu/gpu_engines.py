"""Runners of the accelerator path on a fake device, and the results of requests on them and on the CPU path."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.gpu import make_gpu_runner as gpu_start
from llmbackend.engine.gpu.device import Device
from llmbackend.engine.gpu.device_rows import DeviceRows
from llmbackend.engine.gpu.gpu_runner import GpuRunner, StepSampler, StepSampling
from llmbackend.engine.gpu.make_gpu_runner import choose, start
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.sampling.torch_sampling import TorchSampler
from llmbackend.engine.step import RowTable, Runner, SampledTokens, StepPlan
from llmbackend.engine.token_masks import TokenMasks
from tests.helpers.gpu.fake_device import FakeDevice

VOCAB_SIZE = 96


def config_for(path: Path, **options: Any) -> EngineConfig:
    limits = {"max_num_seqs": 6, "block_size": 8, "num_kv_blocks": 60, "max_num_batched_tokens": 48}
    limits |= {"step_target_ms": 0}  # the same batches each time
    return EngineConfig(model=str(path), transport="inline", num_threads=1, **limits | options)


def gpu_runner(
    config: EngineConfig, device: Device | None = None, sampling: StepSampler | None = None, triton: bool = False
) -> GpuRunner:
    """triton: with its kernels; under the interpreter without the steps of the warm-up, which take seconds there and
    have nothing to compile."""
    loaded = load_model(config, dense=True)
    ops, matmul, own_sampling = choose(config, loaded, triton)
    is_interpreted = triton and bool(os.environ.get("TRITON_INTERPRET"))
    with mock.patch.object(gpu_start, "warm_up") if is_interpreted else nullcontext():
        return start(config, loaded, device or FakeDevice(), ops, matmul, sampling or own_sampling, 0.0)


class GreedyOnDevice:
    """Greedy sampling as device work, so that steps can overlap."""

    max_steps_in_flight = 2

    def add_row(self, row: int, request: InferRequest) -> None:
        pass

    def remove_row(self, row: int) -> None:
        pass

    def begin(self, plan: StepPlan, table: RowTable) -> StepSampling:
        return _GreedyStep()


class _GreedyStep:
    def __init__(self) -> None:
        self._token_ids = torch.empty(0, dtype=torch.int32)

    def complete(self) -> None: ...

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        self._token_ids = logits.argmax(-1).to(torch.int32)
        rows.put(*rows.samples(len(logits)), self._token_ids)

    def result(self) -> SampledTokens:
        return SampledTokens(self._token_ids.numpy())


class SamplingOnDevice:
    """The CPU path's sampler as device work, so that steps can overlap: of the table it reads what is on the device."""

    max_steps_in_flight = 2

    def __init__(self, config: EngineConfig) -> None:
        self._sampler = TorchSampler(config.max_num_seqs, VOCAB_SIZE, ())

    def add_row(self, row: int, request: InferRequest) -> None:
        self._sampler.add_row(row, request)

    def remove_row(self, row: int) -> None:
        self._sampler.remove_row(row)

    def begin(self, plan: StepPlan, table: RowTable) -> StepSampling:
        return _StepOnDevice(self._sampler, plan)


class _StepOnDevice:
    def __init__(self, sampler: TorchSampler, plan: StepPlan) -> None:
        self._sampler, self._pending = sampler, plan.masks
        self._masks: TokenMasks | None = None
        self._sampled = SampledTokens(np.empty(0, np.int32))

    def complete(self) -> None:
        if self._pending is not None:
            masks = self._pending.result()
            self._masks = TokenMasks(masks.index.copy(), masks.words.copy(), masks.errors)

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        max_num_seqs, max_model_len = rows.token_table.shape
        table = RowTable(max_num_seqs, max_model_len, 1)
        table.token_ids[:] = rows.token_table.numpy()
        table.num_prompt_tokens[:] = rows.num_prompt_tokens.numpy()
        where = rows.samples(len(logits))
        sampled_rows, positions = (part.numpy().copy() for part in where)
        self._sampled = self._sampler.sample(sampled_rows, positions, logits, table, self._masks)
        rows.put(*where, torch.from_numpy(self._sampled.token_ids))

    def result(self) -> SampledTokens:
        return self._sampled


def mixed_requests(count: int, seed: int, greedy: bool = False) -> list[InferRequest]:
    """Of mixed lengths and ways to sample, or plainly greedy; every other with a beginning that others share."""
    draw = np.random.default_rng(seed)
    shared = tuple(draw.integers(0, VOCAB_SIZE, 20).tolist())
    return [
        InferRequest(
            request_id=f"r{i}",
            prompt_token_ids=(shared if i % 2 else ()) + tuple(draw.integers(0, VOCAB_SIZE, 1 + i * 7 % 30).tolist()),
            sampling=SamplingParams(max_tokens=int(draw.integers(3, 18)), temperature=0.0)
            if greedy
            else SamplingParams(
                max_tokens=int(draw.integers(3, 18)),
                temperature=float(draw.choice([0.0, 0.0, 0.8])),
                top_k=int(draw.choice([0, 5])),
                seed=i,
                frequency_penalty=float(draw.choice([0.0, 0.5])),
                logprobs=[None, 2][draw.integers(2)],
                allowed_token_ids=tuple(range(i, VOCAB_SIZE, 3)) if i % 3 == 2 else (),
            ),
        )
        for i in range(count)
    ]


def tokens_of(config: EngineConfig, runner: Runner, requests: list[InferRequest]) -> tuple[dict[str, Any], int]:
    """What each request gave, added a few at a time, and how often one was preempted."""
    core, waiting = EngineCore(config, runner), list(requests)
    tokens: dict[str, Any] = {request.request_id: [] for request in requests}
    preemptions = 0
    while core.has_work or waiting:
        for request in waiting[:2]:
            core.add(request)
        del waiting[:2]
        result = core.step()
        preemptions = result.stats.num_preemptions
        for output in result.outputs:
            assert not output.error
            tokens[output.request_id] += output.token_ids
    core.check()
    core.close()
    return tokens, preemptions
