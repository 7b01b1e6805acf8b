"""LoRA adapters: the matrices in their files, and several adapters in one batch of a model that runs as modules.

For: the loader, which makes room for adapters beside the linear layers; the runner, which adds and removes them; the
module forward pass, which tells them which tokens are in a step; gpu/lora.py, which reads the same files. Does not
know: requests beyond the adapter's name. Invariants: an adapter that holds more than plain LoRA matrices, or was made
for another model, is refused by name; a token gets its own row's adapter and no other; a step without adapters costs
one check per layer.
Source: the files that PEFT writes (adapter_config.json, adapter_model.safetensors); vLLM's names for the arguments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..adapter_loads import number_of_adapter
from ..config import EngineConfig
from ..gpu.weights.dense import QuantizedLinear
from ..step import FlatStep, Int32Array

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


_RANK_MULTIPLE = 32
"""Ranks are padded with zeros, which change no sum, to a size that the linear kernels compute fast."""


AdaptableLinear = nn.Linear | QuantizedLinear
"""Quantised: of a checkpoint in 4 bits."""


class LoraBatch:
    """Which adapter each row has, and which tokens of the current step are those rows'. Index 0 is no adapter."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._index_of: dict[str, int] = {}
        self._num_added = 0
        self._of_row: Int32Array = np.zeros(max_num_seqs, np.int32)
        self._device = device
        self.groups: tuple[tuple[str, torch.Tensor], ...] = ()
        """Adapter and int64 [tokens] places in the flat batch, for each adapter of the step."""

    def add(self, name: str) -> None:
        self._num_added += 1
        self._index_of[name] = self._num_added

    def remove(self, name: str) -> None:
        """No row that computes has it."""
        del self._index_of[name]

    def __contains__(self, name: str) -> bool:
        return name in self._index_of

    def set_row(self, row: int, name: str) -> None:
        """`name` "" is the model without an adapter. Raises ValueError for one that is not loaded."""
        self._of_row[row] = number_of_adapter(name, self._index_of, none=0)

    def begin(self, step: FlatStep) -> None:
        of_row = self._of_row[step.rows]
        if not of_row.any():
            self.groups = ()
            return
        of_token = np.repeat(of_row, step.query_lens)
        self.groups = tuple(
            (name, torch.from_numpy(np.flatnonzero(of_token == index)).to(self._device))
            for name, index in self._index_of.items()
            if index in of_row
        )


class LoraLinear(nn.Module):
    """A linear layer with adapters: base(x), plus up(down(x)) for each adapter's own tokens."""

    def __init__(self, base: AdaptableLinear, batch: LoraBatch) -> None:
        super().__init__()
        self.base = base
        self.shape = base.out_features, base.in_features
        self.pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
        """down and up, by adapter; no children of this module, so that they can come and go."""
        self._batch = batch

    @property
    def weight(self) -> Any:
        """Some models ask for the weight's type."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        groups = self._batch.groups
        if not groups or not self.pairs:
            return y
        rows, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for name, tokens in groups:
            if (pair := self.pairs.get(name)) is not None:
                down, up = pair
                out[tokens] += up(down(rows[tokens]))
        return y


def adaptable_linears(model: Any) -> Iterator[tuple[str, AdaptableLinear]]:
    """The layers that adapters may change, by name: every linear one but the output head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, QuantizedLinear) and module is not head:
            yield name, module


def wrap_linears(model: Any, batch: LoraBatch) -> dict[str, LoraLinear]:
    """Puts a layer with adapters in the place of each that they may change; by name."""
    wrapped: dict[str, LoraLinear] = {}
    for name, linear in list(adaptable_linears(model)):
        wrapped[name] = LoraLinear(linear, batch)
        model.set_submodule(name, wrapped[name])
    return wrapped


class ModuleAdapters:
    """The adapters of one loaded model. Any thread may `read`; one thread, the model's, does everything else."""

    def __init__(
        self,
        reader: AdapterReader,
        layers: Mapping[str, LoraLinear],
        batch: LoraBatch,
        place: Callable[[nn.ModuleList], nn.ModuleList],
    ) -> None:
        """place: moves plain linear layers to the model's device, in the form in which its own compute"""
        self._reader = reader
        self._layers = layers
        self._place = place
        self.batch = batch

    def read(self, name: str, path: str) -> AdapterMatrices:
        """The adapter in the folder `path`, checked. Raises ValueError naming adapter, file and reason."""
        return self._reader.read(name, path)

    def add(self, name: str, matrices: AdapterMatrices) -> None:
        """Rows may use it from now on."""
        plain = nn.ModuleList()
        for pair in matrices.values():
            fill = -pair.rank % _RANK_MULTIPLE
            plain.append(_linear(nn.functional.pad(pair.down, (0, 0, 0, fill))))
            plain.append(_linear(nn.functional.pad(pair.up, (0, fill))))
        placed = list(self._place(plain))
        for index, module in enumerate(matrices):
            self._layers[module].pairs[name] = placed[2 * index], placed[2 * index + 1]
        self.batch.add(name)

    def remove(self, name: str) -> None:
        """No row that computes has it. An unknown name was never added."""
        if name not in self.batch:
            return
        for layer in self._layers.values():
            layer.pairs.pop(name, None)
        self.batch.remove(name)


def load_adapters(
    config: EngineConfig,
    model: nn.Module,
    wrapped: Mapping[str, LoraLinear],
    batch: LoraBatch,
    dtype: torch.dtype,
    place: Callable[[nn.ModuleList], nn.ModuleList],
) -> ModuleAdapters:
    """The adapters that the config names; others may be added later. Raises ValueError naming adapter, file and
    reason."""
    shapes = {name: layer.shape for name, layer in wrapped.items()}
    reader = AdapterReader(model, shapes, dtype, config.max_lora_rank)
    adapters = ModuleAdapters(reader, wrapped, batch, place)
    for name, path in config.lora_modules.items():
        adapters.add(name, adapters.read(name, path))
    return adapters


def _linear(matrix: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix.contiguous(), requires_grad=False)
    return linear
