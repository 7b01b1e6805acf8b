"""The LoRA adapters of a program, which come and go while it computes: each has a slot of device memory.

For: the engine core, which adds and removes them, and the runner, which asks for a row's slot. Does not know: requests
beyond an adapter's name, how products are computed. Invariants: a slot is written by work on the device, behind every
step that may read what it held before; an adapter has one from `add` to `remove`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ..adapter_loads import number_of_adapter
from ..config import EngineConfig
from ..errors import ProgramUnsupportedError
from ..model.loader import LoadedModel
from ..model.lora import adaptable_linears
from ..model.lora_matrices import AdapterMatrices, AdapterReader
from .device import Device
from .lora_slots import LoraPlace, LoraSlots
from .ops import NO_ADAPTER


def slots_for(config: EngineConfig, loaded: LoadedModel) -> LoraSlots | None:
    """None where the config enables no adapters. One slot is more than adapters may be served: one that is loaded anew
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
                f"LoRA '{name}' has no place beside {len(self._slots)} others that are loaded or still in use, "
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


def _by_name(loaded: LoadedModel, slots: LoraSlots) -> Mapping[str, LoraPlace]:
    places: dict[str, LoraPlace] = {}
    for name, linear in adaptable_linears(loaded.model):
        if linear not in slots.places:
            raise ProgramUnsupportedError(f"LoRA adapters may change '{name}', which is none of the program's products")
        places[name] = slots.places[linear]
    return places
