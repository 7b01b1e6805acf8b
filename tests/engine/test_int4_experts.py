"""Experts that a checkpoint has in 4 bits (compressed-tensors, GPTQ, AWQ) are multiplied as they are on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from llmbackend.adapter.gguf_models import with_directories
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.native_experts import NativeExperts
from llmbackend.engine.model.packing import pack_model
from tests.engine.test_decoder_program import greedy
from tests.engine.test_determinism import CONDITIONS, OUTPUT_TOKENS, requests, run
from tests.engine.test_stored_int4 import FORMS, change, loaded_of
from tests.helpers.gpu.int4_checkpoints import packed, save_int4
from tests.helpers.small_configs import small_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

EXPERTS, CHOSEN, WIDTH, INNER = 5, 2, 256, 96
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 192, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "num_experts_per_tok": CHOSEN,
}  # fmt: skip
OWN = {"num_experts": EXPERTS, "moe_intermediate_size": INNER}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": EXPERTS + 1, "moe_intermediate_size": INNER, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "qwen3_moe": tf.Qwen3MoeConfig(**SIZES, **OWN, head_dim=64, norm_topk_prob=True),
    "qwen2_moe": tf.Qwen2MoeConfig(**SIZES, **OWN, shared_expert_intermediate_size=64),
    "mixtral": tf.MixtralConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=None),
    "olmoe": tf.OlmoeConfig(**SIZES, num_experts=EXPERTS),
    "deepseek_v3": tf.DeepseekV3Config(**SIZES | LATENT),
}
CHOSEN_FORMS = ["AWQ", "GPTQ", "GPTQ, desc_act", "GPTQ, desc_act, symmetric", "compressed-tensors"]
CASES = [("qwen3_moe", form) for form in CHOSEN_FORMS] + [
    (family, form) for family in ("qwen2_moe", "mixtral", "olmoe") for form in ("AWQ", "GPTQ, desc_act")
]
CASES += [("deepseek_v3", "GPTQ"), ("deepseek_v3", "compressed-tensors")]
PROMPT = tuple((11 * i + 5) % SIZES["vocab_size"] for i in range(40))


def saved(path: Path, family: str, form: str) -> Path:
    """A checkpoint in this form; path / "plain" has the weights that it stands for."""
    method, group_size, options = FORMS[form]
    save_int4(FAMILIES[family], path, method, 32 if group_size > 32 else group_size, **options)
    return path / "int4"


def experts_of(path: Path, **arguments: Any) -> NativeExperts:
    """Of the last layer."""
    found = loaded_of(path, **arguments).model.model.layers[-1].mlp.experts
    assert isinstance(found, NativeExperts) and found.gate is not None
    return found


def types_of(experts: NativeExperts) -> list[Type]:
    assert experts.gate is not None
    return [each.first.type for each in (experts.gate, experts.up, experts.down)]


def error_of(experts: NativeExperts, plain: Path) -> float:
    """Of sums over experts, beside those of the weights that the file stands for."""
    model = tf.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(19, WIDTH, generator=draw)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=draw)[:CHOSEN] for _ in range(19)])
    shares = torch.rand(19, CHOSEN, generator=draw)
    with torch.no_grad():
        expected = model.model.layers[-1].mlp.experts(x, chosen, shares)
    return float((experts(x, chosen, shares) - expected).norm() / expected.norm())


@pytest.mark.parametrize(("family", "form"), CASES)
def test_they_stay_as_the_file_has_them(family: str, form: str, tmp_path: Path) -> None:
    path = saved(tmp_path, family, form)
    config = with_directories(EngineConfig(model=str(path), transport="inline"))
    assert config.quantization == "int4"
    info = make_runner(config).info
    assert (info.path, info.path_reason) == ("native", "")
    experts = experts_of(path, dtype="float32", quantization="int4")
    assert set(types_of(experts)) == {Type.INT4 if "symmetric" in FORMS[form][2] else Type.INT4_ZERO}
    assert (experts.up.first.order != 0) == FORMS[form][2].get("desc_act", False)
    assert error_of(experts, tmp_path / "plain") < 0.02  # activations are rounded to 8 bits
    kept = greedy(path, PROMPT, 1, dtype="float32", quantization="int4")[1][0]
    exact = greedy(tmp_path / "plain", PROMPT, 1, dtype="float32")[1][0]
    assert kept == pytest.approx(exact, abs=0.25)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_plain_ones_give_the_tokens_of_transformers(family: str, form: str, tmp_path: Path) -> None:
    path = saved(tmp_path, family, form)
    tokens, _ = greedy(path, PROMPT, 12, dtype="float32")
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()
    assert len(set(tokens)) > 1, "degenerate output"


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_modules_multiply_by_them_too(enforce_eager: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen3_moe", "GPTQ, desc_act")
    options = {"dtype": "float32", "quantization": "int4", "enforce_eager": enforce_eager}
    exact = greedy(tmp_path / "plain", PROMPT, 1, dtype="float32")[1][0]
    assert greedy(path, PROMPT, 1, **options)[1][0] == pytest.approx(exact, abs=0.25)


@pytest.mark.parametrize("form", ["AWQ", "GPTQ, desc_act"])
def test_same_request_same_tokens(form: str, tmp_path: Path) -> None:
    method, group_size, options = FORMS[form]
    config = tf.Qwen3MoeConfig(**SIZES | {"vocab_size": 512}, **OWN, head_dim=64, initializer_range=0.1)
    save_int4(config, tmp_path, method, group_size, **options)
    path = tmp_path / "int4"
    how: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int4"}
    together, _ = run(path, requests(), **how)
    assert all(len(story) == OUTPUT_TOKENS for story in together.values())
    for request in requests()[::3]:
        alone, _ = run(path, [request], max_num_seqs=1, **how)
        assert alone[request.request_id] == together[request.request_id]
    for name in ("large chunks", "one token of a prompt at a time", "preemption", "two threads"):
        story, _ = run(path, requests(), **how, **CONDITIONS[name])
        assert story == together, name


def test_an_expert_may_have_no_order(tmp_path: Path) -> None:
    """As one that no text of the calibration reached."""
    path = saved(tmp_path, "qwen3_moe", "GPTQ, desc_act")
    plain, layer = tmp_path / "plain" / "model.safetensors", "model.layers.1.mlp.experts.3"
    changed, weights = {}, {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        k = load_file(plain)[f"{layer}.{name}.weight"].shape[1]
        order = torch.argsort(load_file(path / "model.safetensors")[f"{layer}.{name}.g_idx"], stable=True)
        changed[f"{layer}.{name}.g_idx"] = (torch.arange(k) // 32).int()
        words = load_file(path / "model.safetensors")[f"{layer}.{name}.qweight"]
        numbers = torch.stack([words >> (4 * i) & 15 for i in range(8)], 1).flatten(0, 1)
        changed[f"{layer}.{name}.qweight"] = packed(numbers[order].t()).t().contiguous()
        weights[f"{layer}.{name}.weight"] = load_file(plain)[f"{layer}.{name}.weight"][:, order].contiguous()
    change(path, changed)
    change(tmp_path / "plain", weights)
    experts = experts_of(path, dtype="float32", quantization="int4")
    assert set(types_of(experts)) == {Type.INT4_ZERO} and experts.up.first.order
    assert error_of(experts, tmp_path / "plain") < 0.02


def test_what_has_nothing_in_common_becomes_int8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A gate and its up in different orders, or one scale that float16 does not hold: all of the layer."""
    path = saved(tmp_path, "qwen3_moe", "GPTQ, desc_act")
    tensors, layer = load_file(path / "model.safetensors"), "model.layers.1.mlp.experts"
    other = tensors[f"{layer}.2.up_proj.g_idx"].roll(1)
    scale = tensors[f"{layer}.4.down_proj.scales"].float() * 1.0001
    change(path, {f"{layer}.2.up_proj.g_idx": other, f"{layer}.4.down_proj.scales": scale})
    loaded = loaded_of(path)
    first, last = (layer.mlp.experts for layer in loaded.model.model.layers)
    assert set(types_of(first)) == {Type.INT4_ZERO} and set(types_of(last)) == {Type.INT8}
    assert f"float16 does not hold the scales of {layer}.4.down_proj: they become int8" in caplog.text


def test_downs_may_be_kept_beside_rounded_gates_and_ups(tmp_path: Path) -> None:
    """Their order of inputs is that of the outputs of these."""
    path = saved(tmp_path, "qwen3_moe", "GPTQ, desc_act, symmetric")
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.experts.0.up_proj.scales"
    change(path, {name: tensors[name].float() * 1.0001})
    experts = experts_of(path, dtype="float32", quantization="int4")
    assert types_of(experts) == [Type.INT8, Type.INT8, Type.INT4] and not experts.up.first.order
    assert error_of(experts, tmp_path / "plain") < 0.02


def test_zeros_of_some_experts_are_those_of_all(tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen3_moe", "GPTQ")
    name = "model.layers.1.mlp.experts.2.up_proj.qzeros"
    zeros = load_file(path / "model.safetensors")[name]
    change(path, {name: torch.full_like(zeros, 0x77777777)})
    assert types_of(experts_of(path)) == [Type.INT4_ZERO] * 3


def test_an_order_that_is_none_is_refused_before_a_kernel_sees_it(tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen3_moe", "GPTQ, desc_act")
    config = with_directories(EngineConfig(model=str(path), transport="inline"))
    model = pack_model(config, load_model(config))
    model.decoder.check(model.memories)
    up = model.decoder.layers[1].experts.up.first  # type: ignore[union-attr]
    assert up.order_offset_bytes is not None
    orders = model.memories.resident[up.order_offset_bytes :][: 4 * EXPERTS * WIDTH].view(np.int32)
    orders[-1] = WIDTH
    with pytest.raises(ValueError, match="its order of inputs does not fit the rest"):
        model.decoder.check(model.memories)


def test_a_router_in_4_bits_is_refused_by_name(tmp_path: Path) -> None:
    save_int4(tf.MixtralConfig(**SIZES, num_local_experts=8), tmp_path, "awq")
    path, name = tmp_path / "int4", "model.layers.1.block_sparse_moe"
    tensors = load_file(path / "model.safetensors")
    parts = {part: tensors[f"{name}.experts.0.w1.{part}"] for part in ("qweight", "qzeros", "scales")}
    change(path, {f"{name}.gate.{part}": each[:, : each.shape[1] // 12].clone() for part, each in parts.items()})
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.gate' is in 4 bits, expected plain weights for a"):
        load_model(EngineConfig(model=str(path), quantization="int4"))


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_biases_that_the_model_lacks_are_zeros(value: float, tmp_path: Path) -> None:
    path, name = saved(tmp_path, "mixtral", "GPTQ"), "model.layers.1.block_sparse_moe.experts.3.w2.bias"
    change(path, {name: torch.full((WIDTH,), value)})
    if value == 0:
        assert types_of(experts_of(path)) == [Type.INT4_ZERO] * 3
        return
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.1\.mlp\.experts\.3\.down_proj\.bias"):
        loaded_of(path)


def test_experts_of_mixtral_may_have_others_names(tmp_path: Path) -> None:
    """As llm-compressor writes them."""
    path = saved(tmp_path, "mixtral", "compressed-tensors")
    file, parts = path / "model.safetensors", {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    tensors = load_file(file)
    renamed = {re.sub(r"\.(w[123])\.", lambda match: f".{parts[match[1]]}.", name): tensors[name] for name in tensors}
    save_file(renamed, file, {"format": "pt"})
    experts = experts_of(path, dtype="float32", quantization="int4")
    assert types_of(experts) == [Type.INT4_ZERO] * 3
    assert error_of(experts, tmp_path / "plain") < 0.02


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_routers_that_transformers_keeps_in_float32_are_not_rounded(quantization: str | None, tmp_path: Path) -> None:
    save_int4(small_config("ernie4_5_moe", {}, 64), tmp_path, "awq")
    path, tensors = tmp_path / "int4", load_file(tmp_path / "int4" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.moe_statics.e_score_correction_bias"))
    correction = torch.rand_like(tensors[name])
    change(path, {name: correction})
    router = loaded_of(path, dtype="bfloat16", quantization=quantization).model.model.layers[1].mlp.gate
    assert router.weight.dtype == torch.float32
    assert torch.equal(router.moe_statics.e_score_correction_bias, correction)


def test_on_an_accelerator_they_are_refused_by_name(tmp_path: Path) -> None:
    config = EngineConfig(model=str(saved(tmp_path, "qwen3_moe", "AWQ")))
    with pytest.raises(
        ValueError, match=r"its experts are in 4 bits, expected plain ones on an accelerator: model\.layers"
    ):
        load_model(config, dense=True)
