"""Reads LoRA adapters in PEFT's format (adapter_config.json, adapter_model.safetensors) without torch.

Used for native programs and for models that run as modules, on a thread that reads files. Invariant: an adapter with
anything beyond the two matrices of linear layers, or with numbers outside their limits, is refused with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
}
"""Fields of adapter_config.json that may require more than two matrices per layer, with the values that do not."""
_MAX_SCALE = 10_000
"""Limit of alpha / rank, which is 0.5 to 4 in trained adapters; larger values make activations overflow."""
_TYPES: Final[dict[str, tuple[str, Callable[[npt.NDArray[Any]], Float32Array]]]] = {
    "F64": ("<f8", lambda x: x.astype(np.float32)),
    "F32": ("<f4", lambda x: x.astype(np.float32)),
    "F16": ("<f2", lambda x: x.astype(np.float32)),
    "BF16": ("<u2", lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32)),
}
"""By safetensors' type names: the stored type, and the conversion to float32."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraArrays:
    down: Float32Array
    """[rank, in_features]"""
    up: Float32Array
    """[out_features, rank], premultiplied by the adapter's scale"""

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the layer."""
        return len(self.up), self.down.shape[1]


AdapterArrays = dict[str, LoraArrays]
"""By the name of the layer."""


class AdapterFiles:
    """May be used from any thread."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], max_lora_rank: int) -> None:
        """shapes: outputs and inputs of each layer that an adapter may change, by its name in the model"""
        self._shapes, self._max_lora_rank = shapes, max_lora_rank

    def read(self, name: str, path: str) -> AdapterArrays:
        """The validated adapter in the folder `path`. Raises ValueError naming adapter, file and reason."""
        try:
            found = _read(Path(path), self._max_lora_rank)
        except (OSError, _FileError, json.JSONDecodeError) as error:
            raise ValueError(f"LoRA '{name}' cannot be read from '{path}': {error}") from error
        except (ValueError, TypeError, AttributeError, re.error) as error:
            raise ValueError(f"LoRA '{name}' in '{path}': {error}") from error
        for module, matrices in found.items():
            self._check(name, module, matrices)
        return found

    def _check(self, name: str, module: str, matrices: LoraArrays) -> None:
        shape = self._shapes.get(module)
        if shape is None:
            known = next(iter(self._shapes), "none")
            raise ValueError(f"LoRA '{name}' changes '{module}', expected linear layers of the decoder, as '{known}'")
        if matrices.shape != shape:
            given = list(matrices.shape)
            raise ValueError(f"LoRA '{name}' was made for a '{module}' of {given}, the model's is {list(shape)}")


class _FileError(Exception):
    """The weights are not a safetensors file."""


def _read(folder: Path, max_lora_rank: int) -> AdapterArrays:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("adapter_config.json is not a JSON object")
    for field, allowed in _UNSUPPORTED.items():
        if field in config and config[field] not in allowed:
            raise ValueError(f"'{field}' is {json.dumps(config[field])}, only {json.dumps(allowed[0])} is supported")
    _check_rank(config.get("r"), max_lora_rank)
    sides: dict[str, dict[str, Float32Array]] = {}
    for tensor_name, tensor in _tensors(folder / "adapter_model.safetensors").items():
        match = _TENSOR_NAME.fullmatch(tensor_name)
        if match is None or tensor.ndim != 2:
            raise ValueError(f"tensor '{tensor_name}' is not one of a plain LoRA's matrices of a linear layer")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    return {module: _matrices(module, pair, config, max_lora_rank) for module, pair in sides.items()}


def _check_rank(rank: Any, max_rank: int) -> None:
    if rank is not None and (type(rank) is not int or not 1 <= rank <= max_rank):
        expected = f"an integer from 1 to {max_rank} (engine argument 'max_lora_rank')"
        raise ValueError(f"'r' is {json.dumps(rank)}, expected {expected}")


def _matrices(module: str, pair: Mapping[str, Float32Array], config: Mapping[str, Any], max_rank: int) -> LoraArrays:
    if set(pair) != {"A", "B"}:
        raise ValueError(f"'{module}' has only one of the matrices lora_A and lora_B")
    down, up = pair["A"], pair["B"]
    rank = len(down)
    if up.shape[1] != rank:
        raise ValueError(f"'{module}' has a lora_A of rank {rank} and a lora_B of rank {up.shape[1]}")
    if not 1 <= rank <= max_rank:
        raise ValueError(f"'{module}' has rank {rank}, expected at most {max_rank} (engine argument 'max_lora_rank')")
    field, alpha = _alpha(module, config)
    if type(alpha) not in (int, float) or not abs(alpha) <= _MAX_SCALE * rank:
        raise ValueError(f"'{field}' is {json.dumps(alpha)}, expected a number of at most {_MAX_SCALE} times the rank")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraArrays(down, up * np.float32(scale))


def _alpha(module: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """The field and its value: the module's own alpha if a pattern matches the end of its name, as in PEFT, else the
    adapter's."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return "alpha_pattern", alpha
    return "lora_alpha", config.get("lora_alpha")


def _tensors(path: Path) -> dict[str, Float32Array]:
    """By name. Raises OSError or _FileError."""
    from safetensors import SafetensorError, deserialize  # 10 ms that engines without adapters save

    try:
        found = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        # deserialize returns no fixed order; sorted, so the same fault is always reported first
        return {name: _tensor(**tensor) for name, tensor in sorted(found, key=itemgetter(0))}
    except (SafetensorError, ValueError) as error:
        raise _FileError(f"{path.name} is not a safetensors file of float matrices: {error}") from error


def _tensor(dtype: str, shape: list[int], data: bytearray) -> Float32Array:
    if dtype not in _TYPES:
        raise ValueError(f"a tensor is of {dtype}, expected one of {', '.join(_TYPES)}")
    stored, widened = _TYPES[dtype]
    return widened(np.frombuffer(data, stored)).reshape(shape)
