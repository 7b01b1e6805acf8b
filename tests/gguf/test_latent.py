"""GGUF files of models with latent attention (`deepseek2`): DeepSeek V2 and V3, GLM-4.7-Flash."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.model.loader import load_model
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.model_directory import gguf_files, model_directory
from tests.engine.test_decoder_program import greedy
from tests.gguf.test_stored import config_of
from tests.helpers.gguf_files import write_model
from tests.helpers.latent_models import LATENT
from tests.helpers.tiny_models import engine_tokens, expected_tokens, prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not library.available(), reason="no native kernels are built"),
]
PROMPT = tuple((11 * i + 5) % 512 for i in range(100))
"""Longer than the text that YaRN stretches."""


def config_for(family: str) -> Any:
    """As published models are: without biases, and both factors of YaRN equal."""
    config = copy.deepcopy(LATENT[family])
    config.attention_bias = False
    if config.rope_parameters.get("rope_type") == "yarn":
        config.rope_parameters = {**config.rope_parameters, "mscale": config.rope_parameters["mscale_all_dim"]}
    return config


def model_of(family: str) -> Any:
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(config_for(family), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and name.endswith(("bias", "weight")):
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model.eval()


def directory_of(path: Path) -> Path:
    return model_directory(gguf_files(path), path.parent / "made")


@pytest.mark.parametrize("is_absorbed", [True, False])
@pytest.mark.parametrize(
    "family", [name for name in LATENT if name != "glm_moe_dsa"]
)  # an architecture that is not read
def test_a_family_computes_as_before_its_conversion(family: str, is_absorbed: bool, tmp_path: Path) -> None:
    model = model_of(family)
    write_model(tmp_path / "tiny.gguf", model, is_absorbed=is_absorbed)
    made = directory_of(tmp_path / "tiny.gguf")
    assert engine_tokens(made)[0] == [expected_tokens(model, prompt) for prompt in prompts()]
    assert greedy(made, PROMPT, 12)[0] == expected_tokens(model, PROMPT)
    assert make_runner(config_of(tmp_path / "tiny.gguf")).info.path == "native"


@pytest.mark.parametrize("is_absorbed", [True, False])
def test_matrices_stay_as_the_file_has_them(is_absorbed: bool, tmp_path: Path) -> None:
    """What gives keys and values of latents does where the file has it whole; parts turned over become int8."""
    model = model_of("deepseek_v3")
    model.load_state_dict(write_model(tmp_path / "tiny.gguf", model, "Q8_0", is_absorbed=is_absorbed))
    config = config_of(tmp_path / "tiny.gguf", quantization="int4")
    layer = load_model(config).model.model.layers[1]
    kept = {layer.self_attn.q_b_proj, layer.self_attn.kv_a_proj_with_mqa, layer.self_attn.o_proj}
    assert {linear.packed.type for linear in kept} == {Type.Q8_0}
    assert layer.self_attn.kv_b_proj.packed.type is (Type.INT8 if is_absorbed else Type.Q8_0)
    experts = layer.mlp.experts
    assert {each.first.type for each in (experts.gate, experts.up, experts.down)} == {Type.Q8_0}
    assert layer.mlp.shared_experts.up_proj.packed.type is Type.Q8_0
    assert make_runner(config).info.path == "native"
    tokens, logprobs = greedy(directory_of(tmp_path / "tiny.gguf"), PROMPT, 1, dtype="float32", quantization="int4")
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits, -1)[tokens[0]]), abs=0.1)


def test_without_the_field_a_correction_tells_how_experts_are_chosen(tmp_path: Path) -> None:
    for family in ("deepseek_v2", "deepseek_v3"):
        model = model_of(family)
        write_model(tmp_path / f"{family}.gguf", model, extra={"deepseek2.expert_gating_func": 0})
        text = (directory_of(tmp_path / f"{family}.gguf") / "config.json").read_text()
        assert f'"model_type": "{family}"' in text.replace('":"', '": "')


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As files of GLM-4.7-Flash have them."""
    model = model_of("glm4_moe_lite")
    layers = model.config.num_hidden_layers
    norms = {f"blk.{layers}.{name}.weight": np.ones(128) for name in ("attn_norm", "nextn.enorm")}
    fields = {"deepseek2.nextn_predict_layers": 1, "deepseek2.block_count": layers + 1}
    write_model(tmp_path / "tiny.gguf", model, extra=fields, tensors=norms)
    found = greedy(directory_of(tmp_path / "tiny.gguf"), PROMPT, 4)[0]
    assert found == expected_tokens(model, PROMPT)[:4]


@pytest.mark.parametrize(
    ("family", "fields", "error"),
    [
        ("deepseek_v2", {"expert_weights_norm": True}, "'deepseek2.expert_weights_norm' True"),
        ("deepseek_v2", {"expert_gating_func": 4}, "'deepseek2.expert_gating_func' is 4"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "attention.temperature_scale' is not supported"),
        ("deepseek_v3", {"attention.key_length_mla": 32}, "attention.key_length_mla' is 32, expected a number from 33"),
        ("deepseek_v3", {"expert_used_count": 9}, "'deepseek2.expert_used_count' is 9, expected a number from 1 to 8"),
    ],
)
def test_fields_are_checked(family: str, fields: dict[str, Any], error: str, tmp_path: Path) -> None:
    extra = {f"deepseek2.{name}": value for name, value in fields.items()}
    write_model(tmp_path / "tiny.gguf", model_of(family), extra=extra)
    with pytest.raises(GgufError, match=re.escape(error)):
        directory_of(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("heads", [2, 100_000])
def test_heads_that_do_not_fit_are_refused(heads: int, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", model_of("deepseek_v3"), extra={"deepseek2.attention.head_count": heads})
    with pytest.raises(ValueError, match=rf"'blk\.0\.attn_k_b\.weight' is \[4, 512, 64\] .* expected \[{heads}, rank"):
        engine_tokens(directory_of(tmp_path / "tiny.gguf"))


def test_corrections_are_not_rounded(tmp_path: Path) -> None:
    """They lie close together, far from zero, in DeepSeek V3."""
    model = model_of("deepseek_v3")
    given = model.model.layers[1].mlp.gate.e_score_correction_bias
    with torch.no_grad():
        given += 9 + 1e-3 * torch.arange(8)
    write_model(tmp_path / "tiny.gguf", model, "Q8_0")
    loaded = load_model(config_of(tmp_path / "tiny.gguf", quantization="int4"))
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.model.layers[1].mlp.gate.e_score_correction_bias, given)
