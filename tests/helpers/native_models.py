"""Shared by tests of whole native models: engines, greedy requests with transformers' tokens, and the first law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_runner import NativeRunner
from llmbackend.engine.cpu.operations import Role
from llmbackend.engine.cpu.step_profile import profile_runner
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, SamplingParams, TokenLogprobs
from llmbackend.engine.model.module_runner import make_model_runner
from tests.engine.test_determinism import requests, run
from tests.helpers.mock_engine import run_counted

Story = tuple[TokenLogprobs, ...]
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
"""Engine arguments of each weight type."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


def core_of(model: Path, **options: Any) -> EngineCore:
    settings = {"num_threads": 1, "block_size": 32, "step_target_ms": 0, "num_kv_blocks": 32, **options}
    config = EngineConfig(model=str(model), transport="inline", **settings)
    return EngineCore(config, make_model_runner(config))


def greedy(prompts: Sequence[Sequence[int]]) -> list[InferRequest]:
    return [
        InferRequest(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=GREEDY)
        for i, prompt in enumerate(prompts)
    ]


def stories(core: EngineCore, wanted: list[InferRequest]) -> dict[str, Story]:
    outcomes, _ = run_counted(core, wanted)
    assert not {one.error for one in outcomes.of.values()} - {None, ""}
    return {name: one.logprobs for name, one in outcomes.of.items()}


def tokens_of(story: Story) -> list[int]:
    return [token.token_id for token in story]


def generated(oracle: Any, prompt: Sequence[int], **options: Any) -> list[int]:
    """What a model of transformers generates for one of `greedy`."""
    ids = torch.tensor([prompt])
    tokens = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_tokens, do_sample=False, pad_token_id=0,
        eos_token_id=None, **options,
    )  # fmt: skip
    found: list[int] = tokens[0, ids.shape[1] :].tolist()
    return found


def linear_names(modules: Any, *without: str) -> list[str]:
    """Last names of the plain linear layers but the head."""
    names = (name for name, module in modules.named_modules() if type(module) is torch.nn.Linear)
    return sorted({name.rpartition(".")[2] for name in names} - {"lm_head", *without})


def profiled_roles(model: Path) -> list[set[Role]]:
    """The roles of the rows in the profile of each step."""
    config = EngineConfig(model=str(model), transport="inline", num_threads=1, num_kv_blocks=32, max_num_seqs=2)
    runner = make_model_runner(config)
    assert isinstance(runner, NativeRunner)
    steps = profile_runner(runner, max_tokens=32, max_rows=2).steps
    runner.close()
    return [{each.role for each in step.roles} for step in steps]


def check_same_tokens(
    model: Path, how: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]], **alone: Any
) -> None:
    """Each request has the same tokens and logprobs in one batch, alone, and under each condition. how: engine
    arguments of all runs; alone: of those of a single request."""
    together, stats = run(model, requests(), **how)
    assert stats.prefix_cache_hits > 0
    for request in requests()[::2]:
        story, _ = run(model, [request], max_num_seqs=1, **alone, **how)
        assert story[request.request_id] == together[request.request_id]
    for name, condition in conditions.items():
        found, stats = run(model, requests(), **how, **condition)
        assert found == together, name
        assert (stats.num_preemptions > 0) == ("num_kv_blocks" in condition)
        assert (stats.num_draft_tokens > 0) == ("speculative_config" in condition)
