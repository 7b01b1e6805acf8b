"""Checkpoints with 4-bit weights in the formats of llm-compressor, GPTQModel and AutoAWQ, and plain ones with the same
numbers. Packed by loops over the bits, following the formats' descriptions rather than the reading code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.gpu.tiny_models import save

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LAYER = re.compile(r"(.*(?:_proj|\.w[123]))\.weight")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def packed(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [rows, columns / 8] of [rows, columns]."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for place, number in enumerate(order):
        words |= numbers[:, number::8].long() << (4 * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def config_of(method: str, group_size: int, **changes: Any) -> dict[str, Any]:
    """A quantization_config."""
    if method == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": group_size}
        if group_size == -1:
            weights |= {"strategy": "channel", "group_size": None}
        group = {"targets": ["Linear"], "weights": weights | changes, "input_activations": None}
        return {"quant_method": method, "format": "pack-quantized", "config_groups": {"group_0": group}}
    config = {"quant_method": method, "bits": 4, "group_size": group_size}
    more = {"desc_act": False, "sym": False} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    return config | more | changes


def save_int4(
    config: Any, path: Path, method: str, group_size: int = 32, version: int = 1, symmetric: bool = False,
    desc_act: bool = False,
) -> Path:  # fmt: skip
    """In path / "int4"; returns path / "plain", with the weights that it stands for. version, desc_act: of GPTQ.
    symmetric: all zeros are 8. desc_act: groups are of columns all over the matrix, the same in layers of as many
    inputs, of one expert where layers are those of experts."""
    save(config, path / "plain")
    tensors = load_file(path / "plain" / "model.safetensors")
    plain, stored = {}, {}
    for name, weight in tensors.items():
        if (match := _LAYER.fullmatch(name)) is None:
            plain[name] = stored[name] = weight
            continue
        layer = match[1]
        size = weight.shape[1] if group_size == -1 else group_size
        group_of = torch.arange(weight.shape[1]) // size
        if desc_act:
            group_of = group_of[torch.randperm(len(group_of), generator=_drawing(layer, len(group_of)))]
        by_group = torch.argsort(group_of, stable=True)
        numbers, scale, zero = _quantized(weight[:, by_group], group_size, symmetric)
        numbers = numbers[:, torch.argsort(by_group)]
        plain[name] = (numbers.float() - zero.float()[:, group_of]) * scale.float()[:, group_of]
        stored |= _written(method, layer, numbers, scale, zero, group_of, version)
        if method == "gptq" and f"{layer}.bias" not in tensors:
            stored[f"{layer}.bias"] = torch.zeros(len(weight))
    save_file(plain, path / "plain" / "model.safetensors", {"format": "pt"})
    (path / "int4").mkdir()
    save_file(stored, path / "int4" / "model.safetensors", {"format": "pt"})
    changes: dict[str, Any] = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    settings = config_of(method, group_size, **changes, **({"desc_act": True} if desc_act else {}))
    write_config(path, settings)
    return path / "plain"


def _drawing(layer: str, k: int) -> torch.Generator:
    expert = _EXPERT.search(layer)
    return torch.Generator().manual_seed(k if expert is None else k + 1000 * (1 + int(expert[1])))


def write_config(path: Path, settings: dict[str, Any]) -> None:
    config = json.loads((path / "plain" / "config.json").read_text())
    (path / "int4" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def _quantized(
    weight: torch.Tensor, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of 0 … 15 [n, k], scales and zeros [n, groups]."""
    n, k = weight.shape
    size = k if group_size == -1 else group_size
    groups = torch.nn.functional.pad(weight, (0, -k % size)).view(n, -1, size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (torch.maximum(-low, high) / 7 if symmetric else (high - low) / 15).half()
    zero = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(0, 15)
    numbers = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return numbers.view(n, -1)[:, :k].to(torch.uint8), scale, zero.to(torch.uint8)


def _written(
    method: str,
    layer: str,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group_of: torch.Tensor,
    version: int,
) -> dict[str, torch.Tensor]:
    if method == "compressed-tensors":
        parts = {
            "weight_packed": packed(numbers),
            "weight_scale": scale,
            "weight_shape": torch.tensor(numbers.shape),
            "weight_zero_point": packed(zero.t()).t(),
        }
    elif method == "gptq":
        parts = {
            "qweight": packed(numbers).t(),
            "scales": scale.t(),
            "qzeros": packed((zero.t().int() - (1 if version == 1 else 0)) & 15),
            "g_idx": group_of.to(torch.int32),
        }
    else:
        parts = {
            "qweight": packed(numbers.t(), AWQ_ORDER),
            "scales": scale.t(),
            "qzeros": packed(zero.t(), AWQ_ORDER),
        }
    return {f"{layer}.{name}": part.contiguous() for name, part in parts.items()}
