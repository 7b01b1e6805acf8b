"""LoRA adapters as PEFT writes them, and models that they are merged into."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_adapter(model: Any, targets: Sequence[str], folder: Path, seed: int, **config: Any) -> Any:
    """A random adapter of that model; returns a copy of the model that it is merged into."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    draw, merged = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] in targets:
            a = torch.randn(fields["r"], module.in_features, generator=draw) / 4
            b = torch.randn(module.out_features, fields["r"], generator=draw) / 4
            tensors |= {f"base_model.model.{name}.lora_{side}.weight": x for side, x in (("A", a), ("B", b))}
            alpha = fields.get("alpha_pattern", {}).get(name.rpartition(".")[2], fields["lora_alpha"])
            module.weight.data += b @ a * (alpha / (fields["r"] ** 0.5 if fields.get("use_rslora") else fields["r"]))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged
