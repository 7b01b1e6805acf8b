"""What a LoRA adapter's files hold: two matrices for each linear layer that it changes.

For: those who put adapters into a model (lora.py) or a program (gpu/lora.py). Does not know: how they are multiplied.
Invariants: an adapter that holds more than plain LoRA matrices, or that was made for another model, is refused by name;
what was read fits its layer.
Source: the files that PEFT writes (adapter_config.json, adapter_model.safetensors); vLLM's names for the arguments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
}
"""Fields of adapter_config.json that ask for more than two matrices, with the values that do not."""
_MAX_SCALE = 10_000
"""Of alpha over the rank, which is 0.5 to 4 in adapters that were trained: beyond it activations overflow."""


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    down: torch.Tensor
    """[rank, in_features]"""
    up: torch.Tensor
    """[out_features, rank], multiplied by the adapter's scale"""

    @property
    def rank(self) -> int:
        return self.down.shape[0]


AdapterMatrices = dict[str, LoraMatrices]
"""By the names of the layers that they change."""


class AdapterReader:
    """Any thread."""

    def __init__(
        self, model: nn.Module, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, max_lora_rank: int
    ) -> None:
        """shapes: outputs and inputs of each layer that an adapter may change, by its name in the model. dtype: of the
        matrices that are read."""
        self._model, self._shapes = model, shapes
        self._dtype, self._max_lora_rank = dtype, max_lora_rank

    def read(self, name: str, path: str) -> AdapterMatrices:
        """The adapter in the folder `path`, checked. Raises ValueError naming adapter, file and reason."""
        try:
            found = _read(Path(path), self._max_lora_rank)
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"LoRA '{name}' cannot be read from '{path}': {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"LoRA '{name}' in '{path}': {error}") from error
        return {module: self._fitting(name, module, matrices) for module, matrices in found.items()}

    def _fitting(self, name: str, module_name: str, matrices: LoraMatrices) -> LoraMatrices:
        """The matrices in the type of the layer that they change."""
        shape = self._shapes.get(module_name)
        if shape is None:
            try:
                self._model.get_submodule(module_name)
            except AttributeError:
                raise ValueError(f"LoRA '{name}' changes '{module_name}', which this model does not have") from None
            raise ValueError(
                f"LoRA '{name}' changes '{module_name}', expected linear layers inside the decoder's layers"
            )
        if (matrices.up.shape[0], matrices.down.shape[1]) != shape:
            given = f"[{matrices.up.shape[0]}, {matrices.down.shape[1]}]"
            raise ValueError(f"LoRA '{name}' was made for a '{module_name}' of {given}, the model's is {list(shape)}")
        return LoraMatrices(matrices.down.to(self._dtype).contiguous(), matrices.up.to(self._dtype).contiguous())


def _read(folder: Path, max_lora_rank: int) -> dict[str, LoraMatrices]:
    """Matrices by module name."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    for field, allowed in _UNSUPPORTED.items():
        if field in config and config[field] not in allowed:
            raise ValueError(f"'{field}' is {json.dumps(config[field])}, only {json.dumps(allowed[0])} is supported")
    _check_rank(config.get("r"), max_lora_rank)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = _TENSOR_NAME.fullmatch(tensor_name)
        if match is None or tensor.dim() != 2:
            raise ValueError(f"tensor '{tensor_name}' is not one of a plain LoRA's matrices of a linear layer")
        sides.setdefault(match["module"], {})[match["side"]] = tensor.float()
    return {module: _matrices(module, pair, config, max_lora_rank) for module, pair in sides.items()}


def _check_rank(rank: Any, max_rank: int) -> None:
    if rank is not None and (type(rank) is not int or not 1 <= rank <= max_rank):
        expected = f"an integer from 1 to {max_rank} (engine argument 'max_lora_rank')"
        raise ValueError(f"'r' is {json.dumps(rank)}, expected {expected}")


def _matrices(module: str, pair: Mapping[str, torch.Tensor], config: Mapping[str, Any], max_rank: int) -> LoraMatrices:
    if set(pair) != {"A", "B"}:
        raise ValueError(f"'{module}' has only one of the matrices lora_A and lora_B")
    down, up = pair["A"], pair["B"]
    rank = down.shape[0]
    if up.shape[1] != rank:
        raise ValueError(f"'{module}' has a lora_A of rank {rank} and a lora_B of rank {up.shape[1]}")
    if rank > max_rank:
        raise ValueError(f"'{module}' has rank {rank}, expected at most {max_rank} (engine argument 'max_lora_rank')")
    field, alpha = _alpha(module, config)
    if type(alpha) not in (int, float) or not abs(alpha) <= _MAX_SCALE * rank:
        raise ValueError(f"'{field}' is {json.dumps(alpha)}, expected a number of at most {_MAX_SCALE} times the rank")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraMatrices(down, up * scale)


def _alpha(module: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """The field and its value: the module's own alpha where a pattern matches the end of its name, as in PEFT; else the
    adapter's."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return "alpha_pattern", alpha
    return "lora_alpha", config["lora_alpha"]
