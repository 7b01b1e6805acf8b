"""Writes a checkpoint with random weights of 4 bits, as llm-compressor does (compressed-tensors, pack-quantized).

Used by sections that run an engine of such a shape: there are no random weights of 4 bits without files. Independent of
engines. Invariants: groups have scales and no zeros; the output head and the embeddings are in bfloat16; numbers are
uniform, and scales such that products keep the size of their input.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .shapes import Shape

SPREAD = 4.6
"""Standard deviation of uniform numbers of 4 bits less 8."""


def write_int4(shape: Shape, directory: Path, device: str) -> None:
    """device: draws the numbers, of which a CPU needs seconds for each billion. A folder that is whole is kept."""
    import torch
    from safetensors.torch import save_file

    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save_file(dict(_plain(shape, device)), directory / "plain.safetensors", {"format": "pt"})
    for layer in range(shape.num_layers):
        save_file(dict(_layer(shape, layer, device)), directory / f"layer-{layer}.safetensors", {"format": "pt"})
    files = sorted(directory.glob("*.safetensors"))
    index = {name: file.name for file in files for name in _names(file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = shape.config() | {"quantization_config": _quantization(shape.int4_group)}
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _plain(shape: Shape, device: str) -> Iterator[tuple[str, Any]]:
    import torch

    yield "model.norm.weight", torch.ones(shape.hidden_size, dtype=torch.bfloat16)
    for name in ("model.embed_tokens.weight", *(() if shape.tied else ("lm_head.weight",))):
        numbers = torch.randn(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16, device=device)
        yield name, (numbers * 0.02).cpu()


def _layer(shape: Shape, layer: int, device: str) -> Iterator[tuple[str, Any]]:
    import torch

    prefix = f"model.layers.{layer}."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{norm}.weight", torch.ones(shape.hidden_size, dtype=torch.bfloat16)
    for name, (n, k) in shape.linears().items():
        words = torch.randint(-(1 << 31), 1 << 31, (n, k // 8), dtype=torch.int32, device=device)
        scale = torch.full((n, k // shape.int4_group), k**-0.5 / SPREAD, dtype=torch.bfloat16)
        yield f"{prefix}{name}.weight_packed", words.cpu()
        yield f"{prefix}{name}.weight_scale", scale
        yield f"{prefix}{name}.weight_shape", torch.tensor([n, k])


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def _quantization(group_size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
