"""LoRA adapters as tensors, and several adapters in one batch of a model that runs as modules.

The loader wraps the linear layers; the runner adds and removes adapters; the module forward pass says which tokens are
in a step; gpu/lora.py reads the same files. Native programs have their own (cpu/lora.py). Invariants: a token gets only
its own row's adapter; a step without adapters costs one check per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..adapter_files import AdapterFiles, Float32Array
from ..adapter_loads import adapter_number, first_adapters
from ..config import EngineConfig
from ..cpu.linear import HeadedLinear, NativeLinear, PackedLinear
from ..gpu.weights.dense import QuantizedLinear
from ..step import FlatStep, Int32Array


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    down: torch.Tensor
    """[rank, in_features]"""
    up: torch.Tensor
    """[out_features, rank], premultiplied by the adapter's scale"""

    @property
    def rank(self) -> int:
        return self.down.shape[0]


AdapterMatrices = dict[str, LoraMatrices]
"""By the name of the layer."""


class AdapterReader:
    """May be used from any thread."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, max_lora_rank: int) -> None:
        """shapes: outputs and inputs of each layer that an adapter may change, by its name in the model. dtype: of the
        matrices returned."""
        self._files = AdapterFiles(shapes, max_lora_rank)
        self._dtype = dtype

    def read(self, name: str, path: str) -> AdapterMatrices:
        """The validated adapter in the folder `path`. Raises ValueError naming adapter, file and reason."""
        found = self._files.read(name, path)
        return {module: LoraMatrices(self._tensor(pair.down), self._tensor(pair.up)) for module, pair in found.items()}

    def _tensor(self, matrix: Float32Array) -> torch.Tensor:
        return torch.from_numpy(matrix).to(self._dtype).contiguous()


_RANK_MULTIPLE = 32
"""Ranks are zero-padded, which changes no result, to a size for which the linear kernels are fast."""


_ADAPTABLE = nn.Linear, QuantizedLinear, NativeLinear, HeadedLinear, PackedLinear
AdaptableLinear = nn.Linear | QuantizedLinear | NativeLinear | PackedLinear
"""QuantizedLinear occurs only for 4-bit checkpoints on a GPU."""


class LoraBatch:
    """The adapter of each row, and which tokens of the current step belong to those rows. Index 0 is no adapter."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._index_of: dict[str, int] = {}
        self._num_added = 0
        self._of_row: Int32Array = np.zeros(max_num_seqs, np.int32)
        self._device = device
        self.groups: tuple[tuple[str, torch.Tensor], ...] = ()
        """For each adapter of the step: its name, and int64 [tokens] indices into the flat batch."""

    def add(self, name: str) -> None:
        self._num_added += 1
        self._index_of[name] = self._num_added

    def remove(self, name: str) -> None:
        """Must not be used by any row that computes."""
        del self._index_of[name]

    def __contains__(self, name: str) -> bool:
        return name in self._index_of

    def set_row(self, row: int, name: str) -> None:
        """name: "" = the model without an adapter. Raises ValueError if it is not loaded."""
        self._of_row[row] = adapter_number(name, self._index_of, none=0)

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
        """down and up, by adapter; not registered as children, so they can be added and removed."""
        self._batch = batch

    @property
    def weight(self) -> Any:
        """Some models read the weight's type."""
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
    """The layers that adapters may change, by name: every linear layer but the output head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) in _ADAPTABLE and module is not head:
            yield name, module


def wrap_linears(model: Any, batch: LoraBatch) -> dict[str, LoraLinear]:
    """Wraps each layer that adapters may change; by name."""
    wrapped: dict[str, LoraLinear] = {}
    for name, linear in list(adaptable_linears(model)):
        wrapped[name] = LoraLinear(linear, batch)
        model.set_submodule(name, wrapped[name])
    return wrapped


class ModuleAdapters:
    """The adapters of one loaded model. Any thread may call `read`; everything else belongs to the model's thread."""

    def __init__(
        self,
        config: EngineConfig,
        layers: Mapping[str, LoraLinear],
        batch: LoraBatch,
        dtype: torch.dtype,
        place: Callable[[nn.ModuleList], nn.ModuleList],
    ) -> None:
        """Loads the adapters named in the config; others may be added later. place: moves plain linear layers to the
        model's device, in the format in which its own layers compute. Raises ValueError naming adapter, file and
        reason."""
        shapes = {name: layer.shape for name, layer in layers.items()}
        self._reader = AdapterReader(shapes, dtype, config.max_lora_rank)
        self._layers = layers
        self._place = place
        self.batch = batch
        for name, path in first_adapters(config):
            self.add(name, self.read(name, path))

    def read(self, name: str, path: str) -> AdapterMatrices:
        """The validated adapter in the folder `path`. Raises ValueError naming adapter, file and reason."""
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
        """Must not be used by any row that computes. Unknown names are ignored."""
        if name not in self.batch:
            return
        for layer in self._layers.values():
            layer.pairs.pop(name, None)
        self.batch.remove(name)


def _linear(matrix: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix.contiguous(), requires_grad=False)
    return linear
