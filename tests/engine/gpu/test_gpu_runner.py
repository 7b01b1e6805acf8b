"""The runner of the accelerator path beside a device whose work is late: tokens are those of the CPU path."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.gpu.device import Event
from llmbackend.engine.messages import InferRequest, SamplingParams, StepOutput, TokenLogprobs
from llmbackend.engine.model.module_runner import make_model_runner
from llmbackend.engine.step import BROKEN_LOGITS, PENDING_TOKEN, RowTable, Runner, StepPlan
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import GreedyOnDevice, config_for, gpu_runner, mixed_requests, tokens_of
from tests.helpers.gpu.tiny_models import FAMILIES, SIZES, save
from tests.helpers.mock_engine import run_to_end

pytestmark = pytest.mark.usefixtures("one_thread")


FAMILY = "qwen2"


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """What the CPU path gives for REQUESTS."""
    tokens, _ = tokens_of(config_for(model), make_model_runner(config_for(model)), REQUESTS)
    return tokens


REQUESTS = mixed_requests(9, seed=3)
HOW: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "graphs of few sizes": {"cudagraph_capture_sizes": (2, 5)},
    "preemption and small chunks": {"num_kv_blocks": 14, "max_num_batched_tokens": 9, "step_target_ms": 0},
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 4},
}


@pytest.mark.parametrize("how", HOW)
def test_tokens_are_those_of_the_cpu_path(how: str, model: Path, expected: dict[str, list[int]]) -> None:
    config, device = config_for(model, **HOW[how]), FakeDevice()
    runner = gpu_runner(config, device)
    with mock.patch.object(runner, "launch", wraps=runner.launch) as launch:
        tokens, preemptions = tokens_of(config, runner, REQUESTS)
    assert tokens == expected
    assert (preemptions > 0) == (how == "preemption and small chunks")
    if how == "graphs of few sizes":
        assert 0 < device.num_graph_replays < launch.call_count
    else:  # mixed steps, too
        assert device.num_graph_replays == (0 if how == "eager" else launch.call_count)


@pytest.mark.parametrize("how", HOW)
def test_tokens_stay_when_steps_overlap(how: str, model: Path) -> None:
    """The engine core launches each step before the one before it is done, or even begun."""
    requests = mixed_requests(9, seed=4, greedy=True)
    expected, _ = tokens_of(config_for(model), make_model_runner(config_for(model)), requests)
    config = config_for(model, **HOW[how])
    runner = gpu_runner(config, FakeDevice(), sampling=GreedyOnDevice())
    tokens, preemptions = tokens_of(config, runner, requests)
    assert tokens == expected
    assert (preemptions > 0) == (how == "preemption and small chunks")


def test_kernels_give_the_cpu_paths_tokens_and_logprobs(tmp_path: Path) -> None:
    """All of a step in Triton's kernels, products among them, in overlapping steps: penalties count tokens that the
    host has not read. A request alone gets the same, bit by bit."""
    save(tf.Qwen2Config(**SIZES | {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}), tmp_path)
    greedy: dict[str, Any] = {"temperature": 0.0, "logprobs": 2}
    penalized: dict[str, Any] = {"temperature": 0.8, "frequency_penalty": 1.5}
    requests = [
        InferRequest(request_id=f"{i}", prompt_token_ids=(7, 9 + i), sampling=SamplingParams(max_tokens=2, **way))
        for i, way in enumerate((greedy, penalized))
    ]
    config = config_for(tmp_path, max_num_seqs=2, block_size=16, max_num_batched_tokens=4, cudagraph_capture_sizes=(2,))
    expected_tokens, expected = generated(config, make_model_runner(config), requests)
    config = msgspec.structs.replace(config, batch_invariant=True)
    runner = gpu_runner(config, triton=True)
    tokens, logprobs = generated(config, runner, requests)
    assert tokens == expected_tokens
    assert len(logprobs) == 2
    for given, wanted in zip(logprobs, expected, strict=True):
        assert (given.token_id, given.rank) == (wanted.token_id, wanted.rank)
        assert given.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token_id for token_id, _ in given.top] == [token_id for token_id, _ in wanted.top]
    assert generated(config, runner, requests[:1])[1] == logprobs
    runner.close()


def generated(
    config: EngineConfig, runner: Runner, requests: list[InferRequest]
) -> tuple[list[tuple[int, ...]], list[TokenLogprobs]]:
    """Tokens and logprobs of requests that come one step after the other."""
    core = EngineCore(config, runner)
    outputs: list[StepOutput] = []
    for request in requests:
        core.add(request)
        outputs += core.step().outputs
    while core.has_work:
        outputs += core.step().outputs
    mine = [[output for output in outputs if output.request_id == request.request_id] for request in requests]
    tokens = [tuple(token_id for output in of_one for token_id in output.token_ids) for of_one in mine]
    return tokens, [entry for of_one in mine for output in of_one for entry in output.logprobs]


def test_products_that_do_not_depend_on_the_batch_need_their_kernels(model: Path) -> None:
    for options in ({"block_size": 16, "kernels": "torch"}, {"block_size": 16}):
        config = config_for(model, batch_invariant=True, **options)
        with pytest.raises(ValueError, match="'batch_invariant' is true, which needs a GPU, triton and its kernels"):
            gpu_runner(config, triton="kernels" in options)
    with pytest.raises(ValueError, match="'block_size' is 24, expected a power of two from 16"):
        gpu_runner(config_for(model, block_size=24), triton=True)


# --- steps that overlap -----------------------------------------------------------------------------------------------


class Driver:
    """Launches steps by hand, as the engine core does, with tokens that the host has not read yet."""

    def __init__(self, model: Path, prompts: list[list[int]], **options: Any) -> None:
        self.device = FakeDevice()
        self.runner = gpu_runner(config_for(model, **options), self.device, sampling=GreedyOnDevice())
        self.table = RowTable(6, self.runner.info.max_model_len, 8)
        self.step_id = 0
        blocks = np.random.default_rng(0).permutation(60).astype(np.int32)
        for row, prompt in enumerate(prompts):
            self.runner.add_row(row, InferRequest(request_id=f"{row}", prompt_token_ids=tuple(prompt),
                                                  sampling=SamplingParams()))  # fmt: skip
            self.table.token_ids[row, : len(prompt)] = prompt
            self.table.num_tokens[row] = self.table.num_prompt_tokens[row] = len(prompt)
            self.table.block_table[row, :8] = blocks[8 * row : 8 * row + 8]

    def plan(self, rows: list[int]) -> StepPlan:
        index = np.array(rows, np.int32)
        counts = self.table.num_tokens[index] - self.table.num_computed_tokens[index]
        return StepPlan(index, counts, np.ones(len(rows), np.bool_))

    def launch(self, rows: list[int]) -> None:
        plan, table = self.plan(rows), self.table
        self.step_id += 1
        self.runner.launch(self.step_id, plan, table)
        table.num_computed_tokens[plan.rows] += plan.num_scheduled_tokens
        table.token_ids[plan.rows, table.num_tokens[plan.rows]] = PENDING_TOKEN
        table.num_tokens[plan.rows] += 1

    def collect(self) -> tuple[int, list[int]]:
        step_id, sampled = self.runner.collect()
        return step_id, sampled.token_ids.tolist()


PROMPTS = [[7, 30, 2, 5], [11] * 9, [1, 2, 3]]


def sequential(model: Path, steps: list[list[int]]) -> list[list[int]]:
    """What each of the steps samples when every one is read before the next is launched."""
    driver, found = Driver(model, PROMPTS), []
    for rows in steps:
        driver.launch(rows)
        found.append(driver.collect()[1])
    driver.runner.close()
    return found


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}])
def test_a_step_sees_what_the_one_before_sampled(model: Path, options: dict[str, Any]) -> None:
    """Nothing runs before it is waited for: steps are two ahead of what was read, and of what the device has done."""
    steps = [[0, 1, 2], [2, 0, 1], [1, 0], [1, 2], [0, 1, 2]]
    driver, found = Driver(model, PROMPTS, **options), []
    for i, rows in enumerate(steps):
        driver.launch(rows)
        if i:
            found.append(driver.collect())
    found.append(driver.collect())
    driver.runner.close()
    assert found == [(i + 1, tokens) for i, tokens in enumerate(sequential(model, steps))]


def test_pinned_memory_is_left_alone_while_a_step_reads_it(model: Path) -> None:
    """More launches than buffers: the next one waits for the oldest, and no step sees another's message."""
    steps = [[0, 1, 2], [0], [1], [2], [0, 2]]
    driver = Driver(model, PROMPTS)
    for rows in steps:
        driver.launch(rows)
    assert [driver.collect()[1] for _ in steps] == sequential(model, steps)
    driver.runner.close()


def test_a_row_that_got_another_request_while_a_step_is_in_flight(model: Path) -> None:
    driver = Driver(model, PROMPTS)
    driver.launch([0, 1])
    driver.launch([0, 1])  # row 0 is over, as its first token will tell
    driver.collect()
    prompt = [9, 8, 7, 6, 5]
    driver.runner.remove_row(0)
    driver.runner.add_row(0, InferRequest(request_id="new", prompt_token_ids=tuple(prompt), sampling=SamplingParams()))
    table = driver.table
    table.token_ids[0, :5], table.num_tokens[0], table.num_prompt_tokens[0] = prompt, 5, 5
    table.num_computed_tokens[0] = 0
    table.block_table[0, :2] = [50, 51]
    driver.launch([0, 1])
    driver.collect()
    other = Driver(model, [prompt])
    other.launch([0])
    assert driver.collect()[1][0] == other.collect()[1][0]
    driver.runner.close()
    other.runner.close()


class FullDevice(FakeDevice):
    """Runs out of memory, when it is told to, with a part of a step enqueued."""

    num_left = -1

    def record(self) -> Event:
        self.num_left -= 1
        if not self.num_left:
            raise torch.OutOfMemoryError("no memory")
        return super().record()


@pytest.mark.parametrize("num_left", [1, 2, 3])
def test_a_launch_that_failed_leaves_nothing(num_left: int, model: Path) -> None:
    """The row's prompt and blocks are told again by the launch after it, and what is in flight goes on."""
    expected = sequential(model, [[0, 1], [0, 1, 2]])
    driver = Driver(model, PROMPTS)
    device = FullDevice()
    driver.runner = gpu_runner(config_for(model), device, sampling=GreedyOnDevice())
    for row, prompt in enumerate(PROMPTS):
        driver.runner.add_row(row, InferRequest(request_id=f"{row}", prompt_token_ids=tuple(prompt),
                                                sampling=SamplingParams()))  # fmt: skip
    driver.launch([0, 1])
    device.num_left = num_left
    with pytest.raises(torch.OutOfMemoryError):
        driver.launch([0, 1, 2])
    driver.launch([0, 1, 2])
    assert [driver.collect()[1], driver.collect()[1]] == expected
    driver.runner.close()


@pytest.mark.parametrize("num_left", [20, 21, 22])
def test_a_step_that_runs_out_of_memory_costs_no_token(num_left: int, model: Path) -> None:
    requests = mixed_requests(5, seed=6, greedy=True)
    expected, _ = tokens_of(config_for(model), make_model_runner(config_for(model)), requests)
    device = FullDevice()
    runner = gpu_runner(config_for(model), device, sampling=GreedyOnDevice())
    device.num_left = num_left
    assert tokens_of(config_for(model), runner, requests)[0] == expected
    assert device.num_left < 0


def test_broken_logits_end_their_request_and_no_other(tmp_path: Path) -> None:
    """What it left in the KV memory is finite, and changes no request that gets its blocks."""
    broken = save(FAMILIES["qwen2"], tmp_path)
    with torch.no_grad():
        broken.model.embed_tokens.weight[95] = float("nan")
    broken.save_pretrained(tmp_path)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    prompts = {"a": (1, 2, 3), "broken": (4, 6, 95), "b": (7, 8), "c": (9, 10, 11, 12)}
    requests = [InferRequest(request_id=name, prompt_token_ids=p, sampling=sampling) for name, p in prompts.items()]
    config = config_for(tmp_path, max_num_seqs=2, num_kv_blocks=4, enable_prefix_caching=False)
    found: list[dict[str, str]] = []
    for runner in (make_model_runner(config), gpu_runner(config)):
        core, outputs = EngineCore(config, runner), {request.request_id: "" for request in requests}
        for request in requests:
            core.add(request)
        while core.has_work:
            for output in core.step().outputs:
                outputs[output.request_id] += f"{output.token_ids}{output.error}"
        core.check()
        core.close()
        found.append(outputs)
    assert found[1] == found[0]
    assert found[1]["broken"] == f"(){BROKEN_LOGITS}"


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_prompt_logprobs_are_those_of_the_cpu_path(family: str, overlaps: bool, tmp_path: Path) -> None:
    """Also of steps in flight, of chunks, and where logits are capped behind the head."""
    save(FAMILIES[family], tmp_path)
    asked = [
        msgspec.structs.replace(
            request,
            sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=i % 3, max_tokens=i % 2 * 6),
        )
        for i, request in enumerate(mixed_requests(7, seed=3, greedy=True))
    ]
    chunks = {"max_num_batched_tokens": 9, "max_num_seqs": 4}
    expected = run_to_end(EngineCore(config_for(tmp_path), make_model_runner(config_for(tmp_path))), asked)
    config, stories = config_for(tmp_path, **chunks), []
    for options in (config_for(tmp_path), config):
        core = EngineCore(options, gpu_runner(options, FakeDevice(), GreedyOnDevice() if overlaps else None))
        stories.append(run_to_end(core, asked))
        core.close()
    for story, request in itertools.product(stories, asked):
        one, exact = story[request.request_id], expected[request.request_id]
        assert one.token_ids == exact.token_ids
        assert len(exact.prompt_logprobs) == len(request.prompt_token_ids) - 1
        for got, wanted in zip(one.prompt_logprobs, exact.prompt_logprobs, strict=True):
            assert (got.token_id, got.rank) == (wanted.token_id, wanted.rank)
            assert [token_id for token_id, _ in got.top] == [token_id for token_id, _ in wanted.top]
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
