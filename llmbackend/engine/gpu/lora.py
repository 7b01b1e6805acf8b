"""The LoRA adapters of a program, in slots of device memory that are allocated once.

The program requests memory product by product; the engine core adds and removes adapters; the runner asks for the slot
of a row. Invariants: no memory is allocated or moved after the start, so captured graphs stay valid; a slot is only
written after every step that may read its previous content; an adapter has a slot from `add` to `remove`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..adapter_loads import adapter_number
from ..config import EngineConfig
from ..errors import ProgramUnsupportedError
from ..model.loader import LoadedModel
from ..model.lora import AdapterMatrices, AdapterReader, LoraMatrices, adaptable_linears
from .device import Device
from .ops.ops import NO_ADAPTER, LoraSpec

_MIN_RANK = 16
"""Minimum rank of a slot: the minimum of a tensor core."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerSlots:
    """The place of one layer's matrices in every slot."""

    spec: LoraSpec
    part: int

    def write(self, slot: int, matrices: LoraMatrices | None) -> None:
        """Device work. None = the adapter does not change this layer."""
        if matrices is None:
            self.spec.ranks[slot, self.part] = 0
            return
        rank, first, begin = matrices.rank, self.part * self.spec.max_rank, sum(self.spec.widths[: self.part])
        self.spec.down[slot, first : first + rank].copy_(matrices.down)
        self.spec.up[slot, begin : begin + len(matrices.up), :rank].copy_(matrices.up)
        self.spec.ranks[slot, self.part] = rank


class LoraSlots:
    """The memory of all adapters of one program."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self._max_rank = max(_MIN_RANK, 1 << (max_rank - 1).bit_length())
        self._dtype, self._device = dtype, device
        self.by_layer: dict[nn.Module, LayerSlots] = {}
        self.specs: list[LoraSpec] = []

    def for_product(self, layers: Sequence[tuple[nn.Module, int]], k: int) -> LoraSpec:
        """layers: those whose outputs make up the product, each with its number of outputs. Raises
        torch.OutOfMemoryError."""
        widths = tuple(n for _, n in layers)
        spec = LoraSpec(
            down=self._zeros(len(layers) * self._max_rank, k),
            up=self._zeros(sum(widths), self._max_rank),
            ranks=torch.zeros((self.num_slots, len(layers)), dtype=torch.int32, device=self._device),
            widths=widths,
        )
        self.by_layer |= {layer: LayerSlots(spec, part) for part, (layer, _) in enumerate(layers)}
        self.specs.append(spec)
        return spec

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros((self.num_slots, *shape), dtype=self._dtype, device=self._device)


def slots_for(config: EngineConfig, loaded: LoadedModel) -> LoraSlots | None:
    """None = the config enables no adapters. One slot is spare: while requests still use the previous version of a
    reloaded adapter, both are in memory."""
    if not config.enable_lora:
        return None
    num_slots = max(config.max_loras, len(config.lora_modules)) + 1
    return LoraSlots(num_slots, config.max_lora_rank, loaded.dtype, loaded.device)


class DeviceAdapters:
    """The adapters of one program. Any thread may call `read`; everything else belongs to the engine's thread."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, slots: LoraSlots, device: Device) -> None:
        """slots: of a complete program. Loads the adapters named in the config. Raises ValueError naming adapter, file
        and reason, or ProgramUnsupportedError if adapters may change a layer that the program does not have."""
        self._layers = _by_name(loaded, slots)
        shapes = {name: (linear.out_features, linear.in_features) for name, linear in adaptable_linears(loaded.model)}
        self._reader = AdapterReader(shapes, loaded.dtype, config.max_lora_rank)
        self._device = device
        self._slots: dict[str, int] = {}
        self._free = list(range(slots.num_slots))
        for name, path in config.lora_modules.items():
            self.add(name, self.read(name, path))

    def read(self, name: str, path: str) -> AdapterMatrices:
        """The validated adapter in the folder `path`. Raises ValueError naming adapter, file and reason."""
        return self._reader.read(name, path)

    def add(self, name: str, matrices: AdapterMatrices) -> None:
        """Rows may use it from now on. Raises ValueError if there is no free slot."""
        if not self._free:
            raise ValueError(
                f"LoRA '{name}' does not fit: {len(self._slots)} others are loaded or in use, "
                "expected a higher engine argument 'max_loras'"
            )
        slot = self._free[0]
        self._device.enqueue(partial(self._write, slot, matrices))
        self._slots[name] = self._free.pop(0)

    def remove(self, name: str) -> None:
        """Called once no live request uses it; unknown names are ignored. Steps in flight may still read the slot:
        later writes follow them."""
        if name in self._slots:
            self._free.append(self._slots.pop(name))

    def slot_of(self, name: str) -> int:
        """NO_ADAPTER for "". Raises ValueError if the adapter is not loaded."""
        return adapter_number(name, self._slots, NO_ADAPTER)

    @torch.inference_mode()
    def _write(self, slot: int, matrices: AdapterMatrices) -> None:
        for name, layer in self._layers.items():
            layer.write(slot, matrices.get(name))


def _by_name(loaded: LoadedModel, slots: LoraSlots) -> Mapping[str, LayerSlots]:
    found: dict[str, LayerSlots] = {}
    for name, linear in adaptable_linears(loaded.model):
        if linear not in slots.by_layer:
            raise ProgramUnsupportedError(f"LoRA adapters may change '{name}', which is not one of its linear layers")
        found[name] = slots.by_layer[linear]
    return found
