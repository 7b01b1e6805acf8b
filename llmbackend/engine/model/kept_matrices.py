"""The matrices of a 4-bit checkpoint that `quantization: int4` keeps as stored, in the formats that the CPU kernels
multiply.

Used by the loader. Invariant: numbers, scales and zero points are those of the file; a layer is left out if float16
cannot represent its scales exactly. Groups of more than 32 inputs become groups of 32 with equal scales and zero
points.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..config import EngineConfig
from ..cpu.linear import StoredMatrices
from ..kernels.library import GROUP
from ..kernels.operations import Type
from ..kernels.weights import FourBits, StoredBlocks
from .checkpoint_files import few
from .int4_formats import BLOCKS, SCALES, Int4Format, Int4Groups, Mxfp4Format, PackedFormat

logger = logging.getLogger(__name__)


def kept_matrices(
    config: EngineConfig, form: PackedFormat, tensors: Mapping[str, torch.Tensor]
) -> StoredMatrices | None:
    """tensors: the checkpoint's, by module names. None = int4 rounds all weights. Raises CheckpointError."""
    if config.quantization is None and config.device == "cpu" and isinstance(form, Int4Format):
        logger.info("weights in 4 bits become plain ones: quantization 'int4' would keep them")
    if config.quantization != "int4":
        return None
    if isinstance(form, Mxfp4Format):
        return StoredMxfp4(tensors)
    return StoredInt4(form, tensors) if isinstance(form, Int4Format) and form.linears(tensors) else None


class StoredInt4:
    """Linear layers (compressed-tensors, GPTQ, AWQ), by module name. Each is read on demand."""

    def __init__(self, form: Int4Format, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises CheckpointError naming the tensor."""
        self._form, self._tensors = form, tensors
        self._types: dict[str, Type] = {}
        self._orders: dict[str, bytes] = {}
        refused: list[str] = []
        for layer in sorted(form.linears(tensors)):
            groups = form.groups(tensors, layer)
            if not _are_float16(groups.scale):
                refused.append(layer)
                continue
            self._types[layer] = Type.INT4 if groups.zero is None else Type.INT4_ZERO
            if groups.order is not None:
                self._orders[layer] = _order(groups.order).tobytes()
        if refused:
            logger.warning("float16 does not hold the scales of %s: they become int8", few(refused))

    def type_of(self, layer: str) -> Type | None:
        return self._types.get(layer)

    def order_of(self, layer: str) -> bytes:
        return self._orders.get(layer, b"")

    def read(self, layer: str) -> FourBits:
        stored = self._form.read(self._tensors, layer)
        groups, numbers = stored.groups, stored.numbers.numpy()
        k = numbers.shape[1]
        zeros = None if groups.zero is None else _spread(groups, groups.zero, k)
        order = None if groups.order is None else _order(groups.order)
        return FourBits(numbers, _spread(groups, groups.scale.half(), k), None, zeros, order)


def _are_float16(scale: torch.Tensor) -> bool:
    return torch.equal(scale.half().double(), scale.double())


def _order(order: torch.Tensor) -> npt.NDArray[np.int32]:
    return order.numpy().astype(np.int32)


def _spread(groups: Int4Groups, values: torch.Tensor, k: int) -> npt.NDArray[Any]:
    """Repeats the values for groups of GROUP inputs."""
    of_groups = np.repeat(values.numpy(), -(-groups.size // GROUP), axis=1)
    return of_groups[:, : -(-k // GROUP)]


_HALF: Final = 16
"""Numbers in the low nibbles of a block's bytes."""
_PARTS: Final = {"gate_proj": ("gate_up_proj", slice(0, None, 2)), "up_proj": ("gate_up_proj", slice(1, None, 2)),
                 "down_proj": ("down_proj", slice(None))}  # fmt: skip
"""For each layer of an expert: the tensor, and the rows in it."""


class StoredMxfp4:
    """Experts in mxfp4, by the names of single experts' layers. Each is read on demand. GGUF files contain the same
    (e2m1 in groups of 32 inputs with e8m0 scales) in another byte order."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def type_of(self, layer: str) -> Type | None:
        found = self._place(layer)
        return None if found is None or f"{found[0]}{BLOCKS}" not in self._tensors else Type.MXFP4

    def order_of(self, layer: str) -> bytes:
        return b""

    def read(self, layer: str) -> StoredBlocks:
        found = self._place(layer)
        assert found is not None, f"{layer} is in no type that is kept"
        name, expert, rows = found
        blocks, scales = (self._tensors[f"{name}{ending}"][expert][rows] for ending in (BLOCKS, SCALES))
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
