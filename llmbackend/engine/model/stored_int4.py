"""Linear layers of a 4-bit checkpoint (compressed-tensors, GPTQ, AWQ), in the format that the CPU kernels multiply.

Used by the loader. Invariant: numbers, scales and zero points are those of the file; a layer is left out if float16
cannot represent its scales exactly. Groups of more than 32 inputs become groups of 32 with equal scales and zero
points.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.library import GROUP
from ..kernels.operations import Type
from ..kernels.weights import FourBits
from .checkpoint_files import few
from .int4_formats import Int4Format, Int4Groups

logger = logging.getLogger(__name__)


class StoredInt4:
    """By module name. Each layer is read on demand."""

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
