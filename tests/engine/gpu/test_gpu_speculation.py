"""Drafts on the accelerator path: more tokens in a step, and the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig, SpeculativeConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.gpu.device import Event
from llmbackend.engine.messages import EngineStats, InferRequest, SamplingParams
from llmbackend.engine.model.module_runner import make_model_runner
from llmbackend.engine.step import Runner
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import SamplingOnDevice, config_for, gpu_runner
from tests.helpers.gpu.tiny_models import SIZES, save
from tests.helpers.mock_engine import Outcomes, run_counted

pytestmark = pytest.mark.usefixtures("one_thread")

EAGER = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1, max_step_tokens=30)


FAMILY = "qwen2"


WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.3, "seed": 5},
    {"temperature": 0.4, "top_p": 0.9, "top_k": 20, "seed": 6},
    {"temperature": 0.0, "frequency_penalty": 0.05, "repetition_penalty": 1.01},
    {"temperature": 0.0, "logit_bias": {7: 1.5}, "min_tokens": 9},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(0, 96, 5))},
    {"temperature": 0.0, "allowed_token_ids": (11,)},
)


def requests() -> list[InferRequest]:
    """Of all ways to sample; texts that repeat, with a beginning that some share."""
    return [
        InferRequest(
            request_id=f"{i}",
            prompt_token_ids=(3, 5, 8, 13) * 4 + (21, i) * (i % 3),
            sampling=SamplingParams(max_tokens=30 + i, logprobs=(None, 2)[i % 2], **way),
        )
        for i, way in enumerate(WAYS)
    ]


def run(config: EngineConfig, runner: Runner) -> tuple[Outcomes, EngineStats]:
    core = EngineCore(config, runner)
    outcomes, stats = run_counted(core, requests())
    core.close()
    return outcomes, stats


def expect_same(found: Outcomes, expected: Outcomes) -> None:
    for request_id, outcome in expected.of.items():
        other = found[request_id]
        assert (other.token_ids, other.finish_reason, other.error) == (outcome.token_ids, outcome.finish_reason, "")
        for ours, theirs in zip(other.logprobs, outcome.logprobs, strict=True):
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"cudagraph_capture_sizes": (2, 9)},
        {"num_kv_blocks": 16, "max_num_batched_tokens": 9},
        {"enable_prefix_caching": False, "block_size": 4},
    ],
)
def test_drafts_change_no_token(options: dict[str, Any], overlaps: bool, model: Path) -> None:
    """overlaps: the device looks drafts up and accepts them, and a step begins before the last one is read."""
    expected, plain = run(config_for(model), make_model_runner(config_for(model)))
    config, device = config_for(model, speculative_config=EAGER, **options), FakeDevice()
    runner = gpu_runner(config, device, SamplingOnDevice(config) if overlaps else None)
    with mock.patch.object(runner, "launch", wraps=runner.launch) as launch:
        found, stats = run(config, runner)
    assert all((call.args[0] > 0) == overlaps for call in launch.call_args_list)
    expect_same(found, expected)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    # Where steps overlap, rows with masks take part in every other one.
    assert stats.num_steps < plain.num_steps or stats.num_preemptions or overlaps
    if not options:
        assert device.num_graph_replays == stats.num_steps


class FailingDevice(FakeDevice):
    """Runs out of memory behind the work of every seventh step."""

    num_records = num_failures = 0

    def record(self) -> Event:
        self.num_records += 1
        if self.num_records % 21 == 0:
            self.num_failures += 1
            raise torch.OutOfMemoryError("no memory")
        return super().record()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_that_failed_is_repeated(overlaps: bool, model: Path) -> None:
    """With its drafts, or without where steps overlap. What it sampled has replaced them on the device, and lengths."""
    options: dict[str, Any] = {"max_num_seqs": 3, "enforce_eager": True}
    expected, _ = run(config_for(model, **options), make_model_runner(config_for(model, **options)))
    config, device = config_for(model, speculative_config=EAGER, **options), FailingDevice()
    runner = gpu_runner(config, device, SamplingOnDevice(config) if overlaps else None)
    device.num_records = device.num_failures = 0
    found, stats = run(config, runner)
    expect_same(found, expected)
    assert device.num_failures > 1
    assert stats.num_accepted_tokens > 0


def test_requests_come_and_go_beside_steps_in_flight(model: Path) -> None:
    """Some begin with the text of others, and some are aborted: the rest get their tokens, and nothing is lost."""
    config = config_for(model, speculative_config=EAGER, max_num_seqs=3)
    expected, _ = run(config_for(model), make_model_runner(config_for(model)))
    core = EngineCore(config, gpu_runner(config, FakeDevice(), SamplingOnDevice(config)))
    found, waiting, aborted = Outcomes(), requests() + [replaced(one, "again") for one in requests()], {"1", "3again"}
    while core.has_work or waiting:
        for request in waiting[:1]:
            core.add(request)
        del waiting[:1]
        found.add(core.step())
        for request_id in aborted:
            if len(found[request_id].token_ids) > 6:
                core.abort(request_id)
        core.check()
    core.close()
    for request_id, outcome in found.of.items():
        wanted = expected[request_id.removesuffix("again")]
        assert outcome.token_ids == wanted.token_ids[: len(outcome.token_ids)]
        assert outcome.finish_reason == ("abort" if request_id in aborted else wanted.finish_reason)


def replaced(request: InferRequest, suffix: str) -> InferRequest:
    return msgspec.structs.replace(request, request_id=request.request_id + suffix)


@pytest.mark.timeout(600)  # the interpreter
def test_kernels_give_the_same_bits_with_drafts(tmp_path: Path) -> None:
    """All of a step in Triton's kernels: rows with several samples, of which some change their logits."""
    save(tf.Qwen2Config(**SIZES | {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}), tmp_path)
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0, "logit_bias": {7: 1e3}, "presence_penalty": 0.5, "logprobs": 1},
        {"temperature": 0.8, "top_p": 0.9},
    )
    asked = [
        InferRequest(request_id=f"{i}", prompt_token_ids=(7, 7), sampling=SamplingParams(max_tokens=4, **way))
        for i, way in enumerate(ways)
    ]
    options = {"max_num_seqs": 2, "block_size": 16, "max_num_batched_tokens": 4, "batch_invariant": True}
    config = config_for(tmp_path, cudagraph_capture_sizes=(4,), speculative_config=EAGER, **options)
    runner = gpu_runner(config, triton=True)
    one_by_one = msgspec.structs.replace(config, speculative_config=None, async_scheduling=False)
    expected, _ = run_counted(EngineCore(one_by_one, runner), asked)
    found, stats = run_counted(EngineCore(config, runner), asked)
    runner.close()
    assert found.of == expected.of
    assert stats.num_accepted_tokens > 0
