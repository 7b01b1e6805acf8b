"""Weights of which every rank of a stage has a part, and how the parts multiply together.

For: sharding, and through it the program, to which they are weights as others. Does not know: models, processes.
Invariant: all ranks get the same bits. Gathered products are those of the whole matrix, since no sum is split; summed
ones send less and add up in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ..weights import DeviceWeight, Matmul, Rows
from .collectives import Collectives


@dataclass(frozen=True, slots=True, eq=False)
class SummedWeight:
    """This rank's input columns of a matrix: the product is the sum of all ranks' products."""

    local: DeviceWeight
    ranks: Collectives

    @property
    def n(self) -> int:
        return self.local.n

    @property
    def k(self) -> int:
        """The number of this rank's columns."""
        return self.local.k

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.local.input_dtype

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        self.local.multiply(matmul, x, None, out)
        self.ranks.all_reduce(out)
        if bias is not None:
            out += bias


@dataclass(frozen=True, slots=True, eq=False)
class GatheredWeight:
    """This rank's output rows of a matrix, the last rank's padded: the product is all ranks' products side by side."""

    local: DeviceWeight
    ranks: Collectives
    n: int

    @property
    def k(self) -> int:
        return self.local.k

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.local.input_dtype

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        part = out.new_empty((len(x), self.local.n))
        self.local.multiply(matmul, x, None if bias is None else self._own(bias), part)
        out.copy_(side_by_side(self.ranks.all_gather(part))[:, : self.n])

    def _own(self, bias: torch.Tensor) -> torch.Tensor:
        width = self.local.n
        own = bias[self.ranks.rank * width : (self.ranks.rank + 1) * width]
        return functional.pad(own, (0, width - len(own)))


@dataclass(frozen=True, slots=True, eq=False)
class GatheringWeight:
    """The same for a product whose inputs are on several ranks: they are gathered first."""

    rows: GatheredWeight

    @property
    def n(self) -> int:
        return self.rows.n

    @property
    def k(self) -> int:
        """The number of inputs that this rank has."""
        return self.rows.k // self.rows.ranks.size

    @property
    def input_dtype(self) -> torch.dtype | None:
        """A scale of 8 bits is of a whole row, which no rank has."""
        return None

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor), "rows are gathered in the model's dtype"
        self.rows.multiply(matmul, side_by_side(self.rows.ranks.all_gather(x)), bias, out)


def side_by_side(parts: torch.Tensor) -> torch.Tensor:
    """[ranks, rows, width] -> [rows, ranks * width]."""
    return parts.transpose(0, 1).flatten(1)
