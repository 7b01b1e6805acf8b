"""Weights as they are in device memory: each matrix once, neighbours side by side.

For: the loader on an accelerator, and programs that multiply by what it left there. Does not know: which model a layer
belongs to. Invariant: after `join_neighbours` a model's modules compute what they did before, from the same memory that
a program reads as one matrix: nothing is there twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import nn

NEIGHBOURS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one input, by the names that transformers gives them, in the order in which programs want their outputs."""


class Matmul(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [T, n] = x [T, k] · weight [n, k]ᵀ + bias [n]; all in one dtype, contiguous."""


@runtime_checkable
class DeviceWeight(Protocol):
    """A matrix [n, k] that programs multiply by: dense, in numbers of 8 bits, or in parts on several devices."""

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int:
        """Columns of what `multiply` takes."""

    def multiply(self, matmul: Matmul, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [T, n] = x [T, k] · thisᵀ + bias [n], all in the model's dtype; by `matmul` where that is a product of
        plain matrices."""


@runtime_checkable
class SplittableWeight(DeviceWeight, Protocol):
    """One that ranks can have parts of."""

    def part(self, start: int, n: int) -> Self:
        """Rows start .. start + n - 1, in the same memory."""

    def rows(self, rows: torch.Tensor) -> Self:
        """A copy of these rows."""

    def columns(self, columns: range) -> Self:
        """A copy of these columns."""

    def above(self, other: Self) -> Self:
        """A copy with the other's rows below."""

    def to(self, device: torch.device) -> Self: ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A matrix [n, k] in the model's dtype, contiguous."""

    tensor: torch.Tensor

    @property
    def n(self) -> int:
        return self.tensor.shape[0]

    @property
    def k(self) -> int:
        return self.tensor.shape[1]

    def multiply(self, matmul: Matmul, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        matmul(x, self.tensor, bias, out)

    def part(self, start: int, n: int) -> DenseWeight:
        return DenseWeight(self.tensor[start : start + n])

    def joined(self, other: DenseWeight) -> DenseWeight | None:
        """One matrix with the other's rows below, when both lie so in one piece of memory."""
        above, below = self.tensor, other.tensor
        same_memory = above.untyped_storage().data_ptr() == below.untyped_storage().data_ptr()
        if not same_memory or above.dtype != below.dtype or self.k != other.k:
            return None
        if below.storage_offset() != above.storage_offset() + above.numel():
            return None
        return DenseWeight(above.as_strided((self.n + other.n, self.k), (self.k, 1)))

    def rows(self, rows: torch.Tensor) -> DenseWeight:
        return DenseWeight(self.tensor[rows])

    def columns(self, columns: range) -> DenseWeight:
        return DenseWeight(self.tensor[:, columns.start : columns.stop].clone())

    def above(self, other: DenseWeight) -> DenseWeight:
        return DenseWeight(torch.cat((self.tensor, other.tensor)))

    def to(self, device: torch.device) -> DenseWeight:
        return DenseWeight(self.tensor.to(device))


@torch.no_grad()
def join_neighbours(model: nn.Module) -> None:
    """Moves the weights of layers that read the same input into one piece of memory, a group at a time, and makes the
    layers' own parameters views of it; what they had is given back to the allocator."""
    for parent in model.modules():
        for names in NEIGHBOURS:
            layers = [getattr(parent, name, None) for name in names]
            # Exact types only: a subclass may keep something else in its weight.
            linears = [layer for layer in layers if type(layer) is nn.Linear]
            if len(linears) == len(names) and len({(x.in_features, x.weight.dtype) for x in linears}) == 1:
                _join(linears)


def _join(linears: list[nn.Linear]) -> None:
    memory = torch.cat([linear.weight for linear in linears])
    parts = torch.split(memory, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
