"""The LoRA adapters of a program, in slots of device memory that are made once.

For: the program, which asks for slots product by product; the engine core, which adds and removes adapters; the runner,
which asks for a row's slot. Does not know: requests beyond an adapter's name, how products are computed. Invariants: no
memory is made or moved after the start, so that captured graphs stay valid; a slot is written by work on the device,
behind every step that may read what it held before; an adapter has one from `add` to `remove`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..adapter_loads import number_of_adapter
from ..config import EngineConfig
from ..errors import ProgramUnsupportedError
from ..model.loader import LoadedModel
from ..model.lora import AdapterMatrices, AdapterReader, LoraMatrices, adaptable_linears
from .device import Device
from .ops.ops import NO_ADAPTER, LoraSpec

_LEAST_RANK = 16
"""Of a slot: a tensor core's least."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerSlots:
    """Where the matrices of one of the model's layers are in every slot."""

    spec: LoraSpec
    part: int

    def write(self, slot: int, matrices: LoraMatrices | None) -> None:
        """Device work. None: the adapter does not change this layer."""
        if matrices is None:
            self.spec.ranks[slot, self.part] = 0
            return
        rank, first, begin = matrices.rank, self.part * self.spec.max_rank, sum(self.spec.widths[: self.part])
        self.spec.down[slot, first : first + rank].copy_(matrices.down)
        self.spec.up[slot, begin : begin + len(matrices.up), :rank].copy_(matrices.up)
        self.spec.ranks[slot, self.part] = rank


class LoraSlots:
    """The memory of all adapters of one program, which asks for it product by product."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self._max_rank = max(_LEAST_RANK, 1 << (max_rank - 1).bit_length())
        self._dtype, self._device = dtype, device
        self.places: dict[nn.Module, LayerSlots] = {}
        """By the model's layer."""
        self.specs: list[LoraSpec] = []

    def for_product(self, layers: Sequence[tuple[nn.Module, int]], k: int) -> LoraSpec:
        """layers: those whose outputs, so many of each, the product's consist of. Raises torch.OutOfMemoryError."""
        widths = tuple(n for _, n in layers)
        spec = LoraSpec(
            down=self._zeros(len(layers) * self._max_rank, k),
            up=self._zeros(sum(widths), self._max_rank),
            ranks=torch.zeros((self.num_slots, len(layers)), dtype=torch.int32, device=self._device),
            widths=widths,
        )
        self.places |= {layer: LayerSlots(spec, part) for part, (layer, _) in enumerate(layers)}
        self.specs.append(spec)
        return spec

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros((self.num_slots, *shape), dtype=self._dtype, device=self._device)


def slots_for(config: EngineConfig, loaded: LoadedModel) -> LoraSlots | None:
    """None where the config enables no adapters. One slot is more than adapters may be served: one that is loaded again
    is there beside the former one, which requests still have."""
    if not config.enable_lora:
        return None
    num_slots = max(config.max_loras, len(config.lora_modules)) + 1
    return LoraSlots(num_slots, config.max_lora_rank, loaded.dtype, loaded.device)


class DeviceAdapters:
    """The adapters of one program. Any thread may `read`; one thread, the engine's, does everything else."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, slots: LoraSlots, device: Device) -> None:
        """slots: those of a complete program. Loads the adapters that the config names. Raises ValueError naming
        adapter, file and reason, and ProgramUnsupportedError where adapters may change what the program has not."""
        self._places = _by_name(loaded, slots)
        shapes = {name: (linear.out_features, linear.in_features) for name, linear in adaptable_linears(loaded.model)}
        self._reader = AdapterReader(loaded.model, shapes, loaded.dtype, config.max_lora_rank)
        self._device = device
        self._slots: dict[str, int] = {}
        self._free = list(range(slots.num_slots))
        for name, path in config.lora_modules.items():
            self.add(name, self.read(name, path))

    def read(self, name: str, path: str) -> AdapterMatrices:
        """The adapter in the folder `path`, checked. Raises ValueError naming adapter, file and reason."""
        return self._reader.read(name, path)

    def add(self, name: str, matrices: AdapterMatrices) -> None:
        """From now on rows may have it. Raises ValueError where there is no slot for it."""
        if not self._free:
            raise ValueError(
                f"LoRA '{name}' does not fit beside {len(self._slots)} others that are loaded or in use, "
                "expected a higher engine argument 'max_loras'"
            )
        slot = self._free[0]
        self._device.enqueue(partial(self._write, slot, matrices))
        self._slots[name] = self._free.pop(0)

    def remove(self, name: str) -> None:
        """No live request has it. An unknown name was never added. Steps in flight may still read the slot: what is
        written to it later is behind them."""
        if name in self._slots:
            self._free.append(self._slots.pop(name))

    def slot_of(self, name: str) -> int:
        """NO_ADAPTER for "". Raises ValueError for an adapter that is not loaded."""
        return number_of_adapter(name, self._slots, NO_ADAPTER)

    @torch.inference_mode()
    def _write(self, slot: int, matrices: AdapterMatrices) -> None:
        for name, place in self._places.items():
            place.write(slot, matrices.get(name))


def _by_name(loaded: LoadedModel, slots: LoraSlots) -> Mapping[str, LayerSlots]:
    places: dict[str, LayerSlots] = {}
    for name, linear in adaptable_linears(loaded.model):
        if linear not in slots.places:
            raise ProgramUnsupportedError(f"LoRA adapters may change '{name}', which is not one of its linear layers")
        places[name] = slots.places[linear]
    return places
