"""The first law with LoRA adapters, bit by bit: a row's tokens and logprobs depend on nothing but its request and its
adapter, and a row without an adapter is computed as if there were none.

For every type of weights that a native program multiplies. The model is that of test_determinism.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from llmbackend.engine.kernels import library
from llmbackend.engine.messages import InferRequest
from tests.engine.test_determinism import CONDITIONS, KINDS, SPECULATION, Story, model, requests, run

__all__ = ["model"]  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

PROGRAMS = [kind for kind in KINDS if kind.startswith("program")]
NAMES = ("", "cat", "dog", "owl")
RANKS = {"cat": 4, "dog": 16, "owl": 24}
TARGETS = {
    "cat": ("q_proj", "v_proj", "gate_proj"),
    "dog": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "owl": ("o_proj", "up_proj", "down_proj"),
}


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The engine arguments."""
    config = tf.AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        modules = tf.AutoModelForCausalLM.from_config(config)
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(TARGETS):
        write_random_adapter(modules, folder / name, seed, TARGETS[name], RANKS[name])
    paths = {name: str(folder / name) for name in TARGETS}
    return {"enable_lora": True, "lora_modules": paths, "max_lora_rank": 24}


def write_random_adapter(modules: Any, folder: Path, seed: int, targets: tuple[str, ...], rank: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in modules.named_modules():
        if name.rpartition(".")[2] in targets:
            for side, size in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(size, generator=draw) / 8
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def with_adapters(names: tuple[str, ...] = NAMES) -> list[InferRequest]:
    return [
        msgspec.structs.replace(request, lora_name=names[i // 3 % len(names)]) for i, request in enumerate(requests())
    ]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_same_request_and_adapter_same_tokens(kind: str, model: Path, adapters: dict[str, Any]) -> None:
    how = KINDS[kind] | adapters
    wanted = with_adapters()
    together, stats = run(model, wanted, **how)
    assert stats.prefix_cache_hits > 0
    plain, _ = run(model, requests(), **KINDS[kind])
    for request in wanted:
        changed = together[request.request_id] != plain[request.request_id]
        assert changed == bool(request.lora_name), request.lora_name
        alone, _ = run(model, [request], max_num_seqs=1, **how)
        assert alone[request.request_id] == together[request.request_id]
    for name, condition in CONDITIONS.items():
        story, stats = run(model, wanted, **how, **condition)
        assert story == together, name
        assert (stats.num_preemptions > 0) == ("num_kv_blocks" in condition)


@pytest.mark.parametrize("kind", ["program bfloat16", "program int8"])
def test_other_adapters_in_flight_change_nothing(kind: str, model: Path, adapters: dict[str, Any]) -> None:
    how = KINDS[kind] | adapters
    expected: dict[str, Story] = {}
    for name in NAMES:
        expected |= {f"{name} {key}": story for key, story in run(model, with_adapters((name,)), **how)[0].items()}
    for names in (NAMES, NAMES[::-1], ("cat", "cat", "dog"), ("", "", "", "owl")):
        for condition in ({}, {"max_num_batched_tokens": 4096}, {"speculative_config": SPECULATION}):
            wanted = with_adapters(names)
            found, _ = run(model, wanted, **how, **condition)
            for request in wanted:
                assert found[request.request_id] == expected[f"{request.lora_name} {request.request_id}"]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_prompt_logprobs_are_those_of_the_adapter(kind: str, model: Path, adapters: dict[str, Any]) -> None:
    wanted = [
        msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=1))
        for request in with_adapters()[:6]
    ]
    how = KINDS[kind] | adapters
    together, _ = run(model, wanted, of_prompt=True, **how)
    for request in wanted:
        alone, _ = run(model, [request], of_prompt=True, **how, **CONDITIONS["one token of a prompt at a time"])
        assert alone[request.request_id] == together[request.request_id]


def test_a_resumed_request_goes_on_with_its_adapter(model: Path, adapters: dict[str, Any]) -> None:
    """As an engine that replaces a dead one gets it."""
    how = KINDS["program int8"] | adapters
    whole, _ = run(model, with_adapters(), **how)
    for cut in (1, 9):
        tokens = {name: tuple(token.token_id for token in story[:cut]) for name, story in whole.items()}
        resumed = [
            msgspec.structs.replace(request, output_token_ids=tokens[request.request_id]) for request in with_adapters()
        ]
        assert run(model, resumed, **how)[0] == {name: story[cut:] for name, story in whole.items()}
