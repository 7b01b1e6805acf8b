"""Small GGUF files: from a transformers model, by the published rules of llama.cpp's conversion, or from given fields.

Tensor names and type layouts come from the gguf package, so that the tests do not repeat the tables of the code under
test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from .gguf_conversions import BY_PAIRS, Array, conversion_of, file_stem

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "granitemoehybrid": "granitehybrid", "bamba": "granitehybrid", "falcon_h1": "falcon-h1",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
}  # fmt: skip
"""By transformers' model type, where it has another name."""
VOCABULARY = ("a", "b", "ab")


def write_model(
    path: Path, model: Any, kind: str | Callable[[str], str] = "F32", extra: Mapping[str, Any] | None = None,
    shards: int = 0, tensors: Mapping[str, Array] | None = None, is_absorbed: bool = True,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """kind: of matrices, or of a matrix by its name in the model; those that the gguf package cannot write are random.
    extra: fields that differ. shards: tensors in each part; 0: one file. tensors: further ones, in F32. is_absorbed: of
    latent attention, as conversions since April 2025 write it. Returns the weights that the file holds, by the model's
    names."""
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    if name == "nemotron_h" and "moe" in config.layers_block_type:
        name = "nemotron_h_moe"
    options = {"split_max_tensors": shards} if shards else {}
    writer = gguf.GGUFWriter(path, name, **options)
    _add_fields(writer, config)
    if name == "deepseek2":
        _add_latent(writer, config, is_absorbed)
    add_vocabulary(writer, config.vocab_size)
    for field, value in (extra or {}).items():
        for known in writer.kv_data:
            known.pop(field, None)
        _add(writer, field, value)
    names = gguf.get_tensor_name_map(_arch(name), config.num_hidden_layers)
    held = _add_tensors(writer, model, kind, names, is_absorbed)
    for stem, values in (tensors or {}).items():
        writer.add_tensor(stem, values.astype(np.float32))
    _finish(writer)
    return held


def write_fields(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Array] | None = None) -> Path:
    """A file of these fields, `general.architecture` among them, and tensors of F32."""
    writer = gguf.GGUFWriter(path, str(fields["general.architecture"]))
    for field, value in fields.items():
        if field != "general.architecture":
            _add(writer, field, value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values.astype(np.float32))
    _finish(writer)
    return path


def add_vocabulary(writer: Any, size: int) -> None:
    tokens = [*VOCABULARY, *(f"t{index}" for index in range(len(VOCABULARY), size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])


def llama_fields(**changes: Any) -> dict[str, Any]:
    """Of a Llama with one layer, without tensors."""
    fields: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(VOCABULARY),
        "tokenizer.ggml.merges": ["a b"],
    }
    fields |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in fields.items() if value is not None}


def _arch(name: str) -> Any:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _add(writer: Any, field: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(field, value)
    elif isinstance(value, int):
        writer.add_uint32(field, value) if value >= 0 else writer.add_int32(field, value)
    elif isinstance(value, float):
        writer.add_float32(field, value)
    elif isinstance(value, str):
        writer.add_string(field, value)
    else:
        writer.add_array(field, value)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- hyperparameters --------------------------------------------------------------------------------------------------


def _add_fields(writer: Any, config: Any) -> None:
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    sliding = rope.get("sliding_attention")
    kinds = getattr(config, "layer_types", None) or ()
    attends = [kind == "full_attention" for kind in kinds]
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    is_nemotron = config.model_type == "nemotron_h"
    widths = [config.intermediate_size * (kind == "mlp") or _width_of_experts(config, kind) for kind in kinds]
    writer.add_feed_forward_length(widths if is_nemotron else config.intermediate_size)
    writer.add_head_count(heads)
    kv_heads = config.num_key_value_heads
    is_by_layer = config.model_type in ("lfm2", "granitemoehybrid", "bamba", "nemotron_h")
    writer.add_head_count_kv([kv_heads * each for each in attends] if is_by_layer else kv_heads)
    epsilons = {"lfm2": "norm_eps", "nemotron_h": "layer_norm_epsilon"}
    writer.add_layer_norm_rms_eps(getattr(config, epsilons.get(config.model_type, "rms_norm_eps")))
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _add_scaling(writer, rope, config)
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if sliding is not None:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", sliding["rope_theta"])
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("granite", "granitemoehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type.startswith("qwen3_5"):
        _add_recurrence(writer, config, rope, attends)
    if config.model_type in ("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"):
        _add_mamba(writer, config)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    is_other = is_nemotron or hasattr(config, "kv_lora_rank")
    if count := 0 if is_other else getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if shared := getattr(config, "shared_expert_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(shared)
    if config.model_type == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        width = config.hidden_size // heads
        writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
    if config.model_type == "bamba":
        writer.add_rope_dimension_count(config.hidden_size // heads // 2)
    elif config.model_type in BY_PAIRS:
        writer.add_rope_dimension_count(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _width_of_experts(config: Any, kind: str) -> int:
    return int(config.moe_intermediate_size) if kind == "moe" else 0


def _add_shares(writer: Any, config: Any) -> None:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.model_type != "deepseek_v2" and config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _add_latent(writer: Any, config: Any, is_absorbed: bool) -> None:
    rank, rotary, value = config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim
    key = config.qk_nope_head_dim + rotary
    if is_absorbed:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_key_length(rank + rotary if is_absorbed else key)
    writer.add_value_length(rank if is_absorbed else value)
    for fields in writer.kv_data:
        fields.pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv(1 if is_absorbed else config.num_attention_heads)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(rotary)
    if (factor := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * factor)
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
    _add_shares(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType(1 if config.model_type == "deepseek_v2" else 2))


def _add_mamba(writer: Any, config: Any) -> None:
    is_nemotron = config.model_type == "nemotron_h"
    heads = config.mamba_num_heads if is_nemotron else config.mamba_n_heads
    width = config.mamba_head_dim if is_nemotron else config.mamba_d_head
    writer.add_ssm_conv_kernel(config.conv_kernel if is_nemotron else config.mamba_d_conv)
    writer.add_ssm_state_size(config.ssm_state_size if is_nemotron else config.mamba_d_state)
    writer.add_ssm_group_count(config.n_groups if is_nemotron else config.mamba_n_groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * width)
    if config.model_type in ("granitemoehybrid", "bamba"):
        writer.add_rope_scaling_finetuned(config.model_type == "bamba")
    if writer.arch == "nemotron_h_moe":
        _add_shares(writer, config)
    if shared := getattr(config, "shared_intermediate_size", 0) or _shared_of_nemotron(writer, config):
        writer.add_expert_shared_feed_forward_length(shared)


def _shared_of_nemotron(writer: Any, config: Any) -> int:
    return int(config.moe_shared_expert_intermediate_size) if writer.arch == "nemotron_h_moe" else 0


def _add_recurrence(writer: Any, config: Any, rope: Mapping[str, Any], attends: list[bool]) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([3, 3, 2, 0])
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [not each for each in attends])


def _add_scaling(writer: Any, rope: Mapping[str, Any], config: Any) -> None:
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        width = config.hidden_size // config.num_attention_heads
        writer.add_tensor("rope_freqs.weight", np.array(_llama3_factors(rope, width), dtype=np.float32))
    if kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _llama3_factors(rope: Mapping[str, Any], width: int) -> list[float]:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for index in range(0, width, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / width)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


# --- tensors ----------------------------------------------------------------------------------------------------------


def _add_tensors(
    writer: Any, model: Any, kind: str | Callable[[str], str], names: Any, is_absorbed: bool
) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, own_kind = tensor.float().numpy(), kind if isinstance(kind, str) else kind(name)
        if ".experts." in name:
            experts = model.get_submodule(name.rpartition(".")[0])
            held[name] = write_experts(writer, experts, name, values, own_kind)
            continue
        if name.endswith("kv_b_proj.weight") and is_absorbed:
            held[name] = _write_absorbed(writer, config, name, values, own_kind)
            continue
        if name.endswith("shared_mlp.input_linear.weight"):
            held[name] = _write_halves(writer, config, name, values, own_kind)
            continue
        conversion = conversion_of(config, name)
        converted = conversion.there(values)
        is_plain = min(values.ndim, converted.ndim) < 2 or "conv" in name.split(".")[-2]
        raw = quantized(converted, "F32" if is_plain else own_kind)
        writer.add_tensor(file_stem(name, names), raw[0], raw_dtype=raw[1])
        held[name] = torch.from_numpy(conversion.back(dequantized(*raw)).reshape(values.shape).copy())
    return held


def _write_absorbed(writer: Any, config: Any, name: str, values: Array, kind: str) -> torch.Tensor:
    """Of each head what gives keys, turned over, and what gives values."""
    key, by_head = config.qk_nope_head_dim, values.reshape(config.num_attention_heads, -1, values.shape[1])
    held = np.empty_like(by_head)
    for part, given, into in (
        ("k", by_head[:, :key].swapaxes(1, 2), held[:, :key].swapaxes(1, 2)),
        ("v", by_head[:, key:], held[:, key:]),
    ):
        raw, number = quantized(np.ascontiguousarray(given).reshape(-1, given.shape[2]), kind)
        raw_by_head = raw.reshape(*given.shape[:2], -1)
        writer.add_tensor(f"blk.{name.split('.')[2]}.attn_{part}_b.weight", raw_by_head, raw_dtype=number)
        into[...] = dequantized(raw, number).reshape(given.shape)
    return torch.from_numpy(held.reshape(values.shape))


def _write_halves(writer: Any, config: Any, name: str, values: Array, kind: str) -> torch.Tensor:
    """A gate above its up, which files have apart."""
    raw, number = quantized(values, kind)
    ending = "_shexp" if config.num_local_experts else ""
    for part, rows in _expert_parts("gate_up_proj", len(values), True).items():
        writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}{ending}.weight", raw[rows], raw_dtype=number)
    return torch.from_numpy(dequantized(raw, number).reshape(values.shape).copy())


def write_experts(writer: Any, module: Any, name: str, values: Array, kind: str) -> torch.Tensor:
    """All experts' matrices or biases, of which gates and ups are tensors of their own. Returns what the file holds."""
    layer, attribute = name.split(".")[2], name.rpartition(".")[2]
    is_bias = attribute.endswith("_bias")
    is_transposed = not is_bias and getattr(module, "is_transposed", False)
    by_row = values.swapaxes(1, 2) if is_transposed else values
    held = np.empty_like(by_row)
    for part, rows in _expert_parts(attribute, by_row.shape[1], getattr(module, "is_concatenated", True)).items():
        given = np.ascontiguousarray(by_row[:, rows])
        raw, number = quantized(given.reshape(-1, given.shape[-1]), "F32" if is_bias else kind)
        raw = raw.reshape(*given.shape[:-1], -1)
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}", raw, raw_dtype=number)
        held[:, rows] = dequantized(raw.reshape(-1, raw.shape[-1]), number).reshape(given.shape)
    return torch.from_numpy(held.swapaxes(1, 2) if is_transposed else held).contiguous()


def _expert_parts(attribute: str, num_rows: int, is_concatenated: bool) -> dict[str, slice]:
    if attribute.startswith(("down_proj", "up_proj")):
        return {attribute.partition("_")[0]: slice(None)}
    if is_concatenated:
        return {"gate": slice(num_rows // 2), "up": slice(num_rows // 2, None)}
    return {"gate": slice(0, None, 2), "up": slice(1, None, 2)}


def quantized(values: Array, kind: str) -> tuple[Array, Any]:
    number = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values.astype(np.float32), number), number
    except NotImplementedError:
        return random_blocks(kind, len(values), values.shape[1], len(values), float(values.std())), number


def dequantized(raw: Array, kind: Any) -> Array:
    with np.errstate(over="ignore"):
        values: Array = gguf.quants.dequantize(raw, kind)
    return values


def random_blocks(kind: str, num_rows: int, num_columns: int, seed: int = 0, spread: float = 0.0) -> Array:
    """Bytes of a type that the gguf package cannot write, with scales that are finite. spread: the standard deviation
    of what they stand for, near enough; 0: any."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 256, (num_rows, num_columns // block, size), dtype=np.uint8)
    for place in _scales(kind):
        scale = draw.normal(0, 0.05, (num_rows, num_columns // block, 1)).astype(np.float16)
        raw[:, :, place : place + 2] = scale.view(np.uint8)
    if kind == "MXFP4":
        raw[:, :, 0] = draw.integers(118, 124, raw.shape[:2])
    if spread:
        factor = spread / dequantized(raw.reshape(num_rows, -1), gguf.GGMLQuantizationType[kind]).std()
        for place in _scales(kind):
            scaled = raw[:, :, place : place + 2].copy().view(np.float16) * np.float16(factor)
            raw[:, :, place : place + 2] = scaled.view(np.uint8)
    return raw.reshape(num_rows, -1)


def _scales(kind: str) -> Sequence[int]:
    """Where a block has scales of 16 bits."""
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
    return places.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,))
