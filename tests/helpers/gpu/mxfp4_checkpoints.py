"""Checkpoints of gpt-oss with experts in mxfp4, in the layout in which OpenAI published it, and plain ones of the same
numbers as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from tests.helpers.gpu.tiny_models import save

GROUP = 32


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [experts, n, k / 32, 16] and scales [experts, n, k / 32] near a weight [experts, k, n]."""
    num_experts, k, n = weight.shape
    groups = weight.transpose(1, 2).float().reshape(num_experts, n, k // GROUP, GROUP)
    exponents = groups.abs().amax(-1).log2().floor() - 2
    values = torch.tensor(FP4_VALUES)
    numbers = (groups / exponents.exp2()[..., None])[..., None].sub(values).abs().argmin(-1).to(torch.uint8)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def save_mxfp4(config: Any, path: Path) -> Path:
    """In path / "mxfp4"; returns path / "plain", with the weights that it stands for."""
    save(config, path / "plain")
    file = path / "plain" / "model.safetensors"
    plain, stored = load_file(file), {}
    for name, weight in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales = packed(weight)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(plain, file, {"format": "pt"})
    (path / "mxfp4").mkdir()
    save_file({name: each.contiguous() for name, each in stored.items()}, path / "mxfp4" / "model.safetensors")
    settings = json.loads((path / "plain" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "mxfp4" / "config.json").write_text(json.dumps(settings))
    return path / "plain"
