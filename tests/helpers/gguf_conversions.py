"""The transformations that llama.cpp's conversion applies to a model's tensors, and their inverses, by its published
rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector

Array = npt.NDArray[Any]
BY_PAIRS = ("llama", "mistral", "mixtral", "granite", "smollm3", "granitemoehybrid", "bamba", "nemotron_h")


def _same(values: Array) -> Array:
    return values


@dataclass(frozen=True)
class Conversion:
    there: Callable[[Array], Array] = _same
    back: Callable[[Array], Array] = _same


def conversion_of(config: Any, name: str) -> Conversion:
    """Of a tensor by its name in the model."""
    part, kind = name.split(".")[-2:]
    is_qwen = config.model_type.startswith("qwen3_5")
    if name.endswith("norm.weight") and "linear_attn" not in name and (is_qwen or "gemma" in config.model_type):
        return Conversion(lambda values: values + np.float32(1), lambda values: values - np.float32(1))
    if config.model_type in BY_PAIRS and part in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
        return Conversion(partial(by_pairs, num_heads=heads), partial(by_halves, num_heads=heads))
    if is_qwen and "linear_attn" in name:
        return _of_recurrence(config, part, kind)
    if (
        config.model_type == "falcon_h1"
        and kind == "weight"
        and (factor := _factors_of_falcon(config).get(part)) is not None
    ):
        return Conversion(lambda values: values * factor, lambda values: values / factor)
    if part in ("mamba", "mixer"):
        return _of_heads(kind)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        groups = config.n_groups if part == "mixer" else getattr(config, "mamba_n_groups", None) or config.n_groups
        return Conversion(lambda values: values.reshape(groups, -1), lambda values: values.reshape(-1))
    return Conversion(np.squeeze) if part in ("conv", "shared_expert_gate") else Conversion()


def file_stem(name: str, names: Any) -> str:
    """The tensor's name in the file. names: the gguf package's."""
    if ".mixer." in name:
        name = name.replace("model.", "backbone.")
    renamed = name.replace(".dt_bias", ".dt_proj.bias").replace(".sinks", ".sinks.weight")
    renamed = renamed.replace("moe.router", "moe.router.layer").replace("_correction_bias", "_correction.bias")
    stem, ending = renamed.rsplit(".", 1)
    found = names.get_name(stem)
    return str(names.get_name(renamed)) if found is None else f"{found}.{ending}"


def _of_heads(kind: str) -> Conversion:
    """Of Mamba2: a number for each head."""
    if kind == "A_log":
        return Conversion(lambda values: -np.exp(values)[:, None], lambda values: np.log(-values[:, 0]))
    return Conversion(lambda values: values[:, None], lambda values: values[:, 0]) if kind == "D" else Conversion()


def _factors_of_falcon(config: Any) -> dict[str, Any]:
    attention, gate_and_down = config.attention_in_multiplier, config.mlp_multipliers
    return {
        "q_proj": attention,
        "k_proj": attention * config.key_multiplier,
        "v_proj": attention,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": gate_and_down[0],
        "down_proj": gate_and_down[1],
        "in_proj": config.ssm_in_multiplier * compute_mup_vector(config).numpy().reshape(-1, 1),
        "out_proj": config.ssm_out_multiplier,
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
    }


def _of_recurrence(config: Any, part: str, kind: str) -> Conversion:
    keys, heads, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim if part in ("in_proj_qkv", "conv1d") else 0
    width = 1 if part in ("in_proj_a", "in_proj_b") or kind in ("A_log", "dt_bias") else width
    there = np.arange(heads * width).reshape(keys, -1, width).swapaxes(0, 1).reshape(-1) + first
    there = np.concatenate((np.arange(first), there))
    back = np.argsort(there)
    if part == "norm":
        return Conversion()
    if part == "out_proj":
        return Conversion(lambda values: values[:, there], lambda values: values[:, back])
    if kind == "A_log":
        return Conversion(lambda values: -np.exp(values[there]), lambda values: np.log(-values[back]))
    return Conversion(lambda values: values.squeeze()[there], lambda values: values[back])


def by_pairs(values: Array, num_heads: int) -> Array:
    shape = values.shape
    return values.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def by_halves(values: Array, num_heads: int) -> Array:
    shape = values.shape
    return values.reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
