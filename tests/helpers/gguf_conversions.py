"""What llama.cpp's conversion does to the values of a model's tensors, and back, by its published rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BY_PAIRS = ("llama", "mistral", "mixtral", "granite", "smollm3")


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
    return Conversion(np.squeeze) if part in ("conv", "shared_expert_gate") else Conversion()


def file_stem(name: str, names: Any) -> str:
    """The tensor's name in the file. names: the gguf package's."""
    if name.endswith(".A_log"):
        return str(names.get_name(name))
    renamed = name.replace(".dt_bias", ".dt_proj.bias").replace(".sinks", ".sinks.weight")
    stem, ending = renamed.rsplit(".", 1)
    return f"{names.get_name(stem)}.{ending}"


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
