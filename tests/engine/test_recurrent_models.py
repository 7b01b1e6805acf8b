"""Models with recurrent layers: transformers' tokens, and the first law for what is kept beside KV blocks.

A request's tokens and logprobs depend on nothing but the request: not on its neighbours, chunks, preemption, kept
states, the number of slots or threads, steps that failed, or an engine that was replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig, SpeculativeConfig
from llmbackend.engine.cpu.native_runner import NativeRunner
from llmbackend.engine.cpu.operations import Role
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kernels import library
from llmbackend.engine.load_forecast import forecast
from llmbackend.engine.messages import InferRequest, SamplingParams, TokenLogprobs
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.module_runner import make_model_runner
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from tests.engine.test_determinism import SPECULATION, requests, run
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.mock_engine import run_counted
from tests.helpers.native_models import (
    KINDS,
    check_same_tokens,
    core_of,
    generated,
    greedy,
    linear_names,
    profiled_roles,
    stories,
    tokens_of,
)
from tests.helpers.recurrent_models import RECURRENT, SIZES, spread_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

CONDITIONS: dict[str, dict[str, Any]] = {
    "small chunks, preemption": {"max_num_batched_tokens": 17, "num_kv_blocks": 9},
    "no prefix cache": {"enable_prefix_caching": False},
    "one token of a prompt at a time": {"max_num_batched_tokens": 1},
    "few rows": {"max_num_seqs": 3},
    "preemption": {"num_kv_blocks": 9, "max_num_batched_tokens": 40},
    "three threads": {"num_threads": 3, "max_num_batched_tokens": 50},
    "speculation": {"speculative_config": SPECULATION},
    "speculation, preemption": {"speculative_config": SPECULATION, "max_num_batched_tokens": 17, "num_kv_blocks": 9},
    "few states before guesses": {
        "speculative_config": SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1, max_step_tokens=5),
        "max_num_seqs": 3,
    },
}
change = msgspec.structs.replace
UNBOUNDED_AFTER_PROMPTS = ("nemotron_h",)
"""transformers leaves out time_step_limit where a step has one token."""
NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module", params=RECURRENT)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(family)
    spread_model(family).save_pretrained(path)
    return path


def random_prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_tokens_are_those_of_transformers(family: str, model: Path) -> None:
    prompts = [random_prompt(length, length) for length in (13, 1, 70, 32, 33)]
    core = core_of(model)
    found = stories(core, greedy(prompts))
    assert core.info.path == "native"
    core.close()
    oracle = spread_model(family)
    for i, prompt in enumerate(prompts):
        assert tokens_of(found[str(i)]) == expected_tokens(oracle, family, prompt)


def expected_tokens(oracle: Any, family: str, prompt: list[int]) -> list[int]:
    return generated(oracle, prompt, use_cache=family not in UNBOUNDED_AFTER_PROMPTS)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=NIGHTLY if kind != "float32" else ()) for kind in KINDS])
def test_same_request_same_tokens(kind: str, model: Path) -> None:
    check_same_tokens(model, KINDS[kind], CONDITIONS)


def test_a_resumed_request_goes_on_as_it_began(model: Path) -> None:
    how = KINDS["bfloat16"]
    whole, _ = run(model, requests(), **how)
    for cut in (1, 9):
        tokens = {name: tuple(token.token_id for token in story[:cut]) for name, story in whole.items()}
        resumed = [change(each, output_token_ids=tokens[each.request_id]) for each in requests()]
        rest, _ = run(model, resumed, max_num_batched_tokens=30, **how)
        assert rest == {name: story[cut:] for name, story in whole.items()}


def test_a_prompt_that_continues_another_begins_at_its_kept_state(model: Path) -> None:
    first, more = random_prompt(75), random_prompt(40, 4)
    fresh, core = core_of(model, enable_prefix_caching=False), core_of(model)
    expected = stories(fresh, greedy([first + more]))
    stories(core, greedy([first]))
    found, stats = run_counted(core, greedy([first + more]))
    assert {name: one.logprobs for name, one in found.of.items()} == expected
    assert stats.prefix_cache_hits == 64  # whole blocks before the last token of the first prompt
    core.check()
    for each in (fresh, core):
        each.close()


def test_choices_of_one_prompt_compute_it_once(model: Path) -> None:
    prompt = tuple(random_prompt(90))
    wanted = [
        InferRequest(
            request_id=str(i), prompt_token_ids=prompt, prefix_group="one",
            sampling=SamplingParams(temperature=1.0, seed=i, max_tokens=8, ignore_eos=True, logprobs=0),
        )
        for i in range(3)
    ]  # fmt: skip
    core = core_of(model, enable_prefix_caching=False, max_num_batched_tokens=40)
    found, stats = run_counted(core, wanted)
    assert stats.prefix_cache_hits == 2 * 64
    core.close()
    for request in wanted:
        alone = core_of(model)
        assert stories(alone, [request]) == {request.request_id: found.of[request.request_id].logprobs}
        alone.close()


class FailingRunner:
    """Fails after some of the steps of more than one row, when they are computed."""

    def __init__(self, runner: NativeRunner, every: int) -> None:
        self._runner, self._every, self._count = runner, every, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        sampled = self._runner.execute(plan, table)
        self._count += len(plan.rows) > 1
        if len(plan.rows) > 1 and self._count % self._every == 0:
            raise RuntimeError("this step fails")
        return sampled


def test_a_step_that_failed_is_computed_again_from_the_states_before_it(model: Path) -> None:
    prompts = [random_prompt(length, length) for length in (70, 40, 5)]
    sound = core_of(model)
    expected = stories(sound, greedy(prompts))
    settings = EngineConfig(model=str(model), transport="inline", num_threads=1, num_kv_blocks=32, step_target_ms=0,
                            max_num_batched_tokens=64)  # fmt: skip
    runner = make_model_runner(settings)
    assert isinstance(runner, NativeRunner)
    core = EngineCore(settings, FailingRunner(runner, 3))
    assert stories(core, greedy(prompts)) == expected
    core.check()


def test_few_slots_of_states_let_requests_wait(model: Path) -> None:
    prompts = [random_prompt(length, length) for length in (70, 40, 5, 90)]
    many = core_of(model)
    expected, state_bytes = stories(many, greedy(prompts)), many.info.state_bytes
    few = core_of(model, kv_cache_memory_bytes=2 * state_bytes)
    assert few.info.num_state_slots == 3  # two for sequences, one for a prefix
    for request in greedy(prompts):
        few.add(request)
    found: dict[str, list[TokenLogprobs]] = {str(i): [] for i in range(len(prompts))}
    while few.has_work:
        result = few.step()
        assert result.stats.num_requests_running <= 3
        few.check()
        for output in result.outputs:
            found[output.request_id] += output.logprobs
    assert {name: tuple(story) for name, story in found.items()} == expected


def test_room_for_no_state_is_refused_with_figures(model: Path) -> None:
    with pytest.raises(ValueError, match=r"'kv_cache_memory_bytes' is 64, expected at least \d+, the state of one"):
        core_of(model, kv_cache_memory_bytes=64)


def test_a_checkpoint_in_bfloat16_stays_in_it(tmp_path: Path) -> None:
    spread_model("lfm2").bfloat16().save_pretrained(tmp_path)
    assert load_model(EngineConfig(model=str(tmp_path), transport="inline")).dtype == torch.bfloat16


def test_what_needs_modules_is_refused_by_name(model: Path) -> None:
    for options, reason in (
        ({"enforce_eager": True}, "enforce_eager is set"),
        ({"kernels": "torch"}, "kernels is 'torch'"),
        ({"block_size": 16}, "block_size is 16"),
    ):
        with pytest.raises(ValueError, match=f"only a native program on a CPU supports, and {reason}"):
            core_of(model, **options)


def test_the_forecast_says_what_a_sequence_keeps(model: Path) -> None:
    config = EngineConfig(model=str(model), num_kv_blocks=32)
    core = core_of(model)
    found = forecast(config)
    assert found.path == "native program"
    assert found.state_bytes == core.info.state_bytes > 0
    assert found.kv_bytes_per_token == core.info.kv_bytes_per_token
    assert f"{core.info.state_bytes / 1e6:.3g} MB of recurrent state per sequence" in core.info.description
    core.close()


def test_adapters_change_every_linear_layer_but_the_head(family: str, model: Path, tmp_path: Path) -> None:
    oracle, prompts = spread_model(family), [random_prompt(length, length) for length in (70, 9)]
    merged = write_adapter(oracle, linear_names(oracle), tmp_path / "adapter", 1, r=2, lora_alpha=1)
    core = core_of(model, enable_lora=True, lora_modules={"adapter": str(tmp_path / "adapter")})
    wanted = greedy(prompts)
    wanted += [change(each, request_id=f"adapted {each.request_id}", lora_name="adapter") for each in wanted]
    found = stories(core, wanted)
    core.close()
    for name, modules in (("", oracle), ("adapted ", merged)):
        for i, prompt in enumerate(prompts):
            assert tokens_of(found[f"{name}{i}"]) == expected_tokens(modules, family, prompt)


def test_same_request_and_adapter_same_tokens(family: str, model: Path, tmp_path: Path) -> None:
    modules = spread_model(family)
    for seed, name in enumerate(("cat", "dog")):
        write_adapter(modules, linear_names(modules)[seed::2], tmp_path / name, seed)
    adapters = {"enable_lora": True, "lora_modules": {name: str(tmp_path / name) for name in ("cat", "dog")}}
    wanted = [change(each, lora_name=("", "cat", "dog")[i % 3]) for i, each in enumerate(requests())]
    how = KINDS["bfloat16"] | adapters
    together, _ = run(model, wanted, **how)
    for name in ("small chunks, preemption", "speculation, preemption", "three threads"):
        assert run(model, wanted, **how, **CONDITIONS[name])[0] == together, name
    plain, _ = run(model, wanted[::3], **KINDS["bfloat16"])
    assert plain == {each.request_id: together[each.request_id] for each in wanted[::3]}


def test_layers_of_other_parts_are_refused_by_name(tmp_path: Path) -> None:
    tf.MiniMaxConfig(**SIZES, num_hidden_layers=2, head_dim=64, num_local_experts=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'minimax' is not supported: .* consist of .*"):
        core_of(tmp_path, load_format="dummy")


def test_the_profile_has_rows_for_recurrent_layers(model: Path) -> None:
    for roles in profiled_roles(model):
        assert {Role.MIXER, Role.CONVOLUTION, Role.MIXER_OUT} <= roles
