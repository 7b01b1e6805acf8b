"""The model for agents' requests: the bundled one, with two adapters, speculation, and a template that supports
thinking.

Used by the acts. Independent of requests. Invariant: everything is generated from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ..server import ModelSetup, demo

LORA_SEPARATOR = "_lora_"
_ADAPTERS = ("doll", "sheep")
_GENERATION = "'<|im_start|>assistant\\n'"
_THINKING = "{{- '<think>\\n' if enable_thinking else '' -}}\n"


def agents_model(name: str, make_weights: Callable[[Path], None] | None = None, **arguments: Any) -> ModelSetup:
    """make_weights: replaces those of a copy of the bundled model."""
    arguments = {"enable_lora": True, "speculative_config": {"num_speculative_tokens": 4}} | arguments
    return demo(name, partial(_prepare, make_weights), **arguments)


def adapters_of(model: str) -> tuple[str, ...]:
    """As models of the OpenAI API."""
    return tuple(f"{model}{LORA_SEPARATOR}{adapter}" for adapter in _ADAPTERS)


def _prepare(make_weights: Callable[[Path], None] | None, version: Path) -> None:
    if make_weights is not None:
        make_weights(version)
    for seed, adapter in enumerate(_ADAPTERS):
        _write_adapter(version, adapter, seed)
    (version / "multi_lora.json").write_text(json.dumps({name: f"weights/{name}" for name in _ADAPTERS}))
    (version / "chat_template.jinja").write_text(thinking_template(version))


def thinking_template(version: Path) -> str:
    """That of a copy of the bundled model, for a model that can think."""
    text = (version / "chat_template.jinja").read_text()
    end = text.rindex("{%- endif -%}")
    assert _GENERATION in text[:end], "the template no longer ends with the turn of the assistant"
    return text[:end] + _THINKING + "{#- </think> ends it. -#}\n" + text[end:]


def _write_adapter(version: Path, name: str, seed: int) -> None:
    config = json.loads((version / "config.json").read_text())
    width, folder = config["hidden_size"], version / "weights" / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    draw, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        place = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{place}.lora_A.weight"] = (draw.standard_normal((2, width)) / 8).astype(np.float32)
        tensors[f"{place}.lora_B.weight"] = (draw.standard_normal((width, 2)) / 8).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
