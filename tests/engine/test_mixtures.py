"""Mixtures of experts in the native program: families against transformers, and the first law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from llmbackend.engine.kernels import library
from tests.engine.test_decoder_program import MIXED, SIZES, greedy, runner, save
from tests.engine.test_determinism import CONDITIONS, OUTPUT_TOKENS, requests, run
from tests.helpers.native_models import KINDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SHARED = {"shared_expert_intermediate_size": 80}
GRANITE = {"residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 3.0}
GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
PROMPT = tuple((7 * i + 3) % 128 for i in range(40))


def families(head_dim: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {**SIZES, "hidden_size": 4 * head_dim}
    heads = {"head_dim": head_dim}
    return {
        "qwen3_moe": tf.Qwen3MoeConfig(**sizes, **heads, **EXPERTS, norm_topk_prob=True),
        "qwen3_moe with dense layers": tf.Qwen3MoeConfig(**sizes, **heads, **EXPERTS, mlp_only_layers=[1]),
        "mixtral": tf.MixtralConfig(**sizes, **LOCAL),
        "qwen2_moe": tf.Qwen2MoeConfig(**sizes, **EXPERTS, **SHARED),
        "olmoe": tf.OlmoeConfig(**sizes, num_experts=8, num_experts_per_tok=3),
        "granitemoe": tf.GraniteMoeConfig(**sizes, **LOCAL, **GRANITE),
        "glm4_moe": tf.Glm4MoeConfig(**sizes, **heads, **GROUPS, **EXPERTS | {"n_routed_experts": 8}, use_qk_norm=True),
        "gpt_oss": tf.GptOssConfig(**sizes, **heads, **MIXED, **LOCAL),
    }


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", families(64))
def test_families_compute_what_transformers_computes(family: str, head_dim: int, tmp_path: Path) -> None:
    model = save(families(head_dim)[family], tmp_path)
    assert runner(tmp_path).info.path == "native"
    tokens, logprobs = greedy(tmp_path, PROMPT, 12)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, -1).max(-1).values
    assert torch.allclose(torch.tensor(logprobs), expected, atol=2e-4)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
@pytest.mark.parametrize("family", families(64))
def test_rounded_weights_are_packed_and_pass_the_check(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    save(families(64)[family], tmp_path)
    assert runner(tmp_path, **options).info.path == "native"


def test_correction_biases_choose(tmp_path: Path) -> None:
    """Zeros in new models, and not a parameter."""
    config = families(64)["glm4_moe"]
    save(config, tmp_path)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias += torch.arange(8).flip(0) / 8
    model.save_pretrained(tmp_path)
    tokens, _ = greedy(tmp_path, PROMPT, 12)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert runner(tmp_path).info.path == "native"
    assert tokens == logits.argmax(-1).tolist()


def test_modules_multiply_packed_experts_too(tmp_path: Path) -> None:
    model = save(families(64)["qwen3_moe"], tmp_path)
    assert runner(tmp_path, enforce_eager=True).info.path != "native"
    tokens, _ = greedy(tmp_path, PROMPT, 8, enforce_eager=True)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("qwen3_moe", kind) for kind in KINDS), ("qwen2_moe", "int4"), ("gpt_oss", "bfloat16"), ("glm4_moe", "int8")],
)
def test_same_request_same_tokens(family: str, kind: str, tmp_path: Path) -> None:
    how, config = KINDS[kind], families(32)[family]
    config.update({"vocab_size": 512, "max_position_embeddings": 192, "initializer_range": 0.1})
    config.save_pretrained(tmp_path)
    together, _ = run(tmp_path, requests(), **how)
    assert all(len(story) == OUTPUT_TOKENS for story in together.values())
    for request in requests()[::3]:
        alone, _ = run(tmp_path, [request], max_num_seqs=1, **how)
        assert alone[request.request_id] == together[request.request_id]
    for name in ("large chunks", "preemption", "two threads"):
        story, stats = run(tmp_path, requests(), **how, **CONDITIONS[name])
        assert story == together, name
        assert (stats.num_preemptions > 0) == (name == "preemption")
