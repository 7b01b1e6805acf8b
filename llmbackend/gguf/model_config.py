"""A GGUF model's config.json and generation_config.json: its hyperparameters by transformers' names.

Invariant: missing fields have llama.cpp's defaults. Sources: llama.cpp's conversion of each family and its model
loader; transformers' configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from .errors import GgufError
from .expert_config import deepseek, deepseek_v2, expert_counts, nemotron_experts
from .families import Family, family_of, num_layers
from .fields import Fields
from .header import Header, TensorInfo

Config = dict[str, Any]
MAX_VECTOR: Final = 1 << 16
MAX_TAPS: Final = 64
ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Those of every Llama since 3.1. Files contain only the resulting factors."""


def model_config(header: Header, token_ids: Mapping[str, Any]) -> Config:
    """token_ids: `bos_token_id` …. Raises GgufError naming field or tensor."""
    family = family_of(header)
    fields = Fields(header.fields, family.architecture)
    if fields.integer("expert_count", 0, least=0) and not family.has_experts:
        raise GgufError(f"its architecture is '{family.architecture}' with experts, which is not supported")
    config = _common(header, family, fields)
    config |= _FAMILIES[family.model_type](header, fields, config)
    return {**config, **token_ids, "dtype": _dtype(header), "architectures": [family.class_name]}


def _common(header: Header, family: Family, fields: Fields) -> Config:
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    if hidden_size % num_heads and not fields.has("attention.key_length"):
        raise fields.wrong("attention.head_count", num_heads, f"a divisor of {hidden_size}, the embedding's length")
    num_kv_heads = fields.common("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads}, the number of heads")
    head_dim = _head_dim(fields, max(hidden_size // num_heads, 1))
    width_of_experts = fields.value("expert_feed_forward_length") if family.has_experts else None
    return {
        "model_type": family.model_type,
        "vocab_size": _embedding(header).shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.common("feed_forward_length", width_of_experts),
        "num_hidden_layers": num_layers(fields),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length", most=1 << 31),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, fields, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _head_dim(fields: Fields, usual: int) -> int:
    """For latent attention, the rotated part of a head."""
    if fields.has("attention.kv_lora_rank"):
        return fields.integer("rope.dimension_count")
    head_dim = fields.integer("attention.key_length", usual)
    if (value_dim := fields.integer("attention.value_length", head_dim)) != head_dim:
        raise fields.wrong("attention.value_length", value_dim, f"{head_dim}, as of keys")
    return head_dim


def _embedding(header: Header) -> TensorInfo:
    if (info := header.tensors.get("token_embd.weight")) is None or len(info.shape) != 2:
        raise GgufError("its tensor 'token_embd.weight' is missing, or no matrix")
    return info


def _dtype(header: Header) -> str:
    matrices = [info for info in header.tensors.values() if len(info.shape) > 1]
    return "float32" if all(info.type.name == "F32" for info in matrices) else "bfloat16"


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def _rope(header: Header, fields: Fields, head_dim: int) -> Config:
    """One set for all layers."""
    theta = fields.number("rope.freq_base", 10000.0)
    plain = {"rope_type": "default", "rope_theta": theta}
    kind = fields.text("rope.scaling.type", "linear" if fields.has("rope.scale_linear") else "none")
    if (info := header.tensors.get(ROPE_FACTORS)) is not None:
        return {**plain, **_of_factors(_vector(ROPE_FACTORS, info), theta, head_dim, fields)}
    if kind == "linear":
        factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
        return plain if factor in (0.0, 1.0) else {**plain, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {**plain, **_yarn(fields)}
    if kind in ("none", "longrope"):  # longrope: see _longrope
        return plain
    raise fields.wrong("rope.scaling.type", kind, "none, linear, yarn or longrope")


def _yarn(fields: Fields) -> Config:
    given = {
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
        "attention_factor": "rope.scaling.yarn_attn_factor",
    }
    return {
        "rope_type": "yarn",
        "factor": fields.number("rope.scaling.factor"),
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length", most=1 << 31),
        **{name: fields.number(field) for name, field in given.items() if fields.has(field)},
    }


def _of_factors(factors: list[float], theta: float, head_dim: int, fields: Fields) -> Config:
    """The divisors of the frequencies: as the rule that produced them, if known, else literally."""
    if len(factors) != head_dim // 2:
        raise GgufError(f"its tensor '{ROPE_FACTORS}' has {len(factors)} numbers, expected {head_dim // 2}")
    factor = max(factors)
    if np.allclose(_llama3_factors(factor, theta, head_dim), factors, rtol=1e-5):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    length = fields.integer("context_length", most=1 << 31)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }


def _llama3_factors(factor: float, theta: float, head_dim: int) -> Any:
    low, high, length = _LLAMA3.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _longrope(header: Header, fields: Fields, config: Config) -> Config:
    """Phi's factors for short and for long sequences."""
    rotary = fields.integer("rope.dimension_count", config["head_dim"])
    rope = {**config["rope_parameters"], "partial_rotary_factor": rotary / config["head_dim"]}
    original = fields.integer("rope.scaling.original_context_length", config["max_position_embeddings"], most=1 << 31)
    found = {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS}
    infos = {name: header.tensors.get(tensor) for name, tensor in found.items()}
    factors = {name: _vector(found[name], info) for name, info in infos.items() if info is not None}
    if factors:
        rope |= factors | {"rope_type": "longrope", "original_max_position_embeddings": original}
        if fields.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = fields.number("rope.scaling.attn_factor")
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def _vector(name: str, info: TensorInfo) -> list[float]:
    if info.type.name != "F32" or len(info.shape) != 1 or info.shape[0] > MAX_VECTOR:
        raise GgufError(f"its tensor '{name}' is {info.type.name} {list(info.shape)}, expected a vector of F32")
    values = np.fromfile(info.file, dtype="<f4", count=info.shape[0], offset=info.offset)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise GgufError(f"its tensor '{name}' has numbers that are not finite and above 0")
    return [float(str(value)) for value in values]


# --- families ---------------------------------------------------------------------------------------------------------


def _mixtral(header: Header, fields: Fields, config: Config) -> Config:
    _check_whole_rotary(fields, config)
    return {**expert_counts(fields, "num_local_experts"), "sliding_window": None}


def _llama(header: Header, fields: Fields, config: Config) -> Config:
    _check_whole_rotary(fields, config)
    return {"attention_bias": _has(header, "attn_q.bias"), "mlp_bias": _has(header, "ffn_gate.bias")}


def _granite(header: Header, fields: Fields, config: Config) -> Config:
    if not fields.boolean("rope.scaling.finetuned", True):
        raise GgufError(
            "its field 'granite.rope.scaling.finetuned' is false: models without positions are not supported"
        )
    return _llama(header, fields, config) | _scales_of_granite(fields, config)


def _scales_of_granite(fields: Fields, config: Config) -> Config:
    return {
        "logits_scaling": fields.number("logit_scale", 1.0),
        "attention_multiplier": fields.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
    }


def _granite_hybrid(header: Header, fields: Fields, config: Config) -> Config:
    """Without experts, a layer's MLP is stored as the shared one."""
    experts = {"num_local_experts": 0}
    if fields.integer("expert_count", 0, least=0):
        experts = expert_counts(fields, "num_local_experts")
    kinds = _attention_layers(fields, config)
    return {
        **_mamba(header, fields),
        "mamba_expand": _expansion(fields, config),
        **_scales_of_granite(fields, config),
        **experts,
        "shared_intermediate_size": fields.integer("expert_shared_feed_forward_length", config["intermediate_size"]),
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in kinds],
        "position_embedding_type": None,
    }


def _bamba(header: Header, fields: Fields, config: Config) -> Config:
    """transformers' Bamba always rotates half of each head."""
    rotary = fields.integer("rope.dimension_count", config["head_dim"])
    if 2 * rotary != config["head_dim"]:
        raise fields.wrong("rope.dimension_count", rotary, f"{config['head_dim'] // 2}, half the width of a head")
    kinds = enumerate(_attention_layers(fields, config))
    return {
        **_mamba(header, fields),
        "mamba_expand": _expansion(fields, config),
        "attn_layer_indices": [layer for layer, attends in kinds if attends],
    }


def _falcon_h1(header: Header, fields: Fields, config: Config) -> Config:
    """The file's weights include all multipliers."""
    _check_whole_rotary(fields, config)
    return {
        **_mamba(header, fields),
        "mamba_d_ssm": fields.integer("ssm.inner_size"),
        "mamba_rms_norm": _has(header, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": _has(header, "attn_q.bias"),
        "mlp_bias": _has(header, "ffn_gate.bias"),
    }


def _nemotron_h(header: Header, fields: Fields, config: Config) -> Config:
    """A layer is either a recurrence, attention, an MLP, or experts."""
    widths = fields.numbers("feed_forward_length", config["num_hidden_layers"])
    attends = _attention_layers(fields, config)
    kinds = zip(attends, widths, strict=True)
    mamba, experts = _mamba(header, fields), nemotron_experts(fields)
    of_width = "moe" if experts else "mlp"
    return {
        **experts,
        "layers_block_type": [
            "full_attention" if attention else of_width if width else "linear_attention" for attention, width in kinds
        ],
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "layer_norm_epsilon": config["rms_norm_eps"],
    }


def _mamba(header: Header, fields: Fields) -> Config:
    """With the names used by most Mamba2 families."""
    heads = fields.integer("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": fields.multiple("ssm.inner_size", heads) // heads,
        "mamba_n_groups": fields.integer("ssm.group_count"),
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel", most=MAX_TAPS),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in header.tensors),
    }


def _expansion(fields: Fields, config: Config) -> int:
    width: int = config["hidden_size"]
    return fields.multiple("ssm.inner_size", width) // width


def _attention_layers(fields: Fields, config: Config) -> list[bool]:
    """For each layer, whether it has key heads."""
    return [int(heads) > 0 for heads in fields.numbers("attention.head_count_kv", config["num_hidden_layers"])]


def _smollm3(header: Header, fields: Fields, config: Config) -> Config:
    return _llama(header, fields, config) | {"no_rope_layer_interval": 4}


def _qwen2(header: Header, fields: Fields, config: Config) -> Config:
    _check_whole_rotary(fields, config)
    return {"use_sliding_window": False}


def _qwen3(header: Header, fields: Fields, config: Config) -> Config:
    return _qwen2(header, fields, config) | {"attention_bias": _has(header, "attn_q.bias")}


def _qwen3moe(header: Header, fields: Fields, config: Config) -> Config:
    """Every layer has experts. llama.cpp renormalises shares."""
    return _qwen3(header, fields, config) | {
        **expert_counts(fields, "num_experts"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(header: Header, fields: Fields, config: Config) -> Config:
    """llama.cpp does not renormalise shares."""
    return _qwen2(header, fields, config) | {
        **expert_counts(fields, "num_experts"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmoe(header: Header, fields: Fields, config: Config) -> Config:
    _check_whole_rotary(fields, config)
    return {**expert_counts(fields, "num_experts"), "norm_topk_prob": False}


def _gpt_oss(header: Header, fields: Fields, config: Config) -> Config:
    """Files do not state that the ends of YaRN's range are not rounded, as in the model's own config."""
    return {
        **expert_counts(fields, "num_local_experts"),
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": _layer_types(fields, config, 2),
        "attention_bias": _has(header, "attn_q.bias"),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


def _gemma2(header: Header, fields: Fields, config: Config) -> Config:
    return {
        "query_pre_attn_scalar": _attention_width(config, layers_of_the_largest=46),
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(fields, config, 2),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(header: Header, fields: Fields, config: Config) -> Config:
    window = fields.integer("attention.sliding_window", 0, least=0)
    ropes = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)},
    }
    if not fields.has("rope.freq_base"):
        ropes["full_attention"] = {**config["rope_parameters"], "rope_theta": 1e6}
    cap = fields.number("final_logit_softcapping", 0.0)
    return {
        "query_pre_attn_scalar": _attention_width(config, layers_of_the_largest=62),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _layer_types(fields, config, 6) if window else ["full_attention"] * config["num_hidden_layers"],
        "rope_parameters": ropes,
        "final_logit_softcapping": cap or None,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _phi3(header: Header, fields: Fields, config: Config) -> Config:
    window = fields.integer("attention.sliding_window", 0, least=0)
    return {"sliding_window": window or None, **_longrope(header, fields, config)}


def _lfm2(header: Header, fields: Fields, config: Config) -> Config:
    """A layer without key heads is a convolution."""
    _check_whole_rotary(fields, config)
    return {
        "layer_types": ["full_attention" if attends else "conv" for attends in _attention_layers(fields, config)],
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": fields.integer("shortconv.l_cache", most=MAX_TAPS),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in header.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _qwen35(header: Header, fields: Fields, config: Config) -> Config:
    key_heads = fields.integer("ssm.group_count")
    heads = fields.multiple("ssm.time_step_rank", key_heads)
    rotary = fields.integer("rope.dimension_count", config["head_dim"])
    return {
        "layer_types": _recurrent_layers(fields, config["num_hidden_layers"]),
        "linear_num_value_heads": heads,
        "linear_num_key_heads": key_heads,
        "linear_value_head_dim": fields.multiple("ssm.inner_size", heads) // heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel", most=MAX_TAPS),
        "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": rotary / config["head_dim"]},
    }


def _qwen35moe(header: Header, fields: Fields, config: Config) -> Config:
    return _qwen35(header, fields, config) | {
        **expert_counts(fields, "num_experts"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
    }


def _recurrent_layers(fields: Fields, count: int) -> list[str]:
    if fields.has("attention.recurrent_layers"):
        is_recurrent = [bool(value) for value in fields.numbers("attention.recurrent_layers", count)]
    else:
        every = fields.integer("full_attention_interval", 4)
        is_recurrent = [(layer + 1) % every != 0 for layer in range(count)]
    return ["linear_attention" if recurrent else "full_attention" for recurrent in is_recurrent]


def _layer_types(fields: Fields, config: Config, every: int) -> list[str]:
    """One layer in every `every` has full attention."""
    count, name = config["num_hidden_layers"], "attention.sliding_window_pattern"
    if isinstance(fields.value(name), np.ndarray):
        is_sliding = [bool(value) for value in fields.numbers(name, count)]
    else:
        every = fields.integer(name, every)
        is_sliding = [(layer + 1) % every != 0 for layer in range(count)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]


def _attention_width(config: Config, layers_of_the_largest: int) -> int:
    """The width whose square root divides attention scores. Files do not state it; the largest Gemma differs from the
    others."""
    if config["num_hidden_layers"] == layers_of_the_largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _check_whole_rotary(fields: Fields, config: Config) -> None:
    rotary = fields.integer("rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"]:
        raise fields.wrong("rope.dimension_count", rotary, f"{config['head_dim']}, the width of a head")


def _has(header: Header, name: str) -> bool:
    return f"blk.0.{name}" in header.tensors


_FAMILIES: Final[Mapping[str, Callable[[Header, Fields, Config], Config]]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "granite": _granite,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2moe,
    "qwen3_moe": _qwen3moe,
    "olmoe": _olmoe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "lfm2": _lfm2,
    "qwen3_5_text": _qwen35,
    "qwen3_5_moe_text": _qwen35moe,
    "granitemoehybrid": _granite_hybrid,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
}
"""By transformers' model type."""
