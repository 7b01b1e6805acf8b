"""Experts of a checkpoint in mxfp4, as gpt-oss is published, in the format that the CPU kernels multiply.

Used by the loader. Invariant: numbers and scales are those of the file. GGUF files contain the same (e2m1 in groups of
32 inputs with e8m0 scales) in another byte order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ..kernels.operations import Type
from ..kernels.weights import StoredBlocks

_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF: Final = 16
"""Numbers in the low nibbles of a block's bytes."""
_PARTS: Final = {"gate_proj": ("gate_up_proj", slice(0, None, 2)), "up_proj": ("gate_up_proj", slice(1, None, 2)),
                 "down_proj": ("down_proj", slice(None))}  # fmt: skip
"""For each layer of an expert: the tensor, and the rows in it."""


class StoredMxfp4:
    """By the names of single experts' layers. Each is read on demand."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def type_of(self, layer: str) -> Type | None:
        found = self._place(layer)
        return None if found is None or f"{found[0]}{_BLOCKS}" not in self._tensors else Type.MXFP4

    def order_of(self, layer: str) -> bytes:
        return b""

    def read(self, layer: str) -> StoredBlocks:
        found = self._place(layer)
        assert found is not None, f"{layer} is in no type that is kept"
        name, expert, rows = found
        blocks, scales = (self._tensors[f"{name}{ending}"][expert][rows] for ending in (_BLOCKS, _SCALES))
        numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
        halves = numbers[:, :, :_HALF] | numbers[:, :, _HALF:] << 4
        return StoredBlocks(Type.MXFP4, torch.cat((scales[:, :, None], halves), dim=-1).flatten(1).contiguous().numpy())

    @staticmethod
    def _place(layer: str) -> tuple[str, int, slice] | None:
        """The tensor's name without its suffix, the expert, and its rows."""
        outer, _, part = layer.rpartition(".")
        experts, _, expert = outer.rpartition(".")
        if part not in _PARTS or not expert.isdigit():
            return None
        name, rows = _PARTS[part]
        return f"{experts}.{name}", int(expert), rows
