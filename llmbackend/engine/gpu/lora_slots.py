"""Device memory for the matrices of a program's LoRA adapters, in slots that are made once.

For: the program, which asks for it product by product, and the adapters that come and go (device_adapters.py). Does not
know: adapters' names, files, which slots are in use. Invariant: no memory is made or moved after the start, so that
captured graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..model.lora_matrices import LoraMatrices
from .ops import LoraSpec

_LEAST_RANK = 16
"""Of a slot: a tensor core's least."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraPlace:
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
        self.places: dict[nn.Module, LoraPlace] = {}
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
        self.places |= {layer: LoraPlace(spec, part) for part, (layer, _) in enumerate(layers)}
        self.specs.append(spec)
        return spec

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros((self.num_slots, *shape), dtype=self._dtype, device=self._device)
