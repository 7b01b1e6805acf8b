"""Matrices of a layer's experts, one for each, in the forms that programs multiply by.

For: descriptions, programs, and what splits them over ranks. Does not know: models, how tokens choose experts.
Invariants: all experts of a layer are in one piece of memory, in which modules and programs read them; rows and columns
are those of each expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch


class ExpertWeight(Protocol):
    """A matrix [n, k] for each expert."""

    @property
    def num_experts(self) -> int: ...

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """What it stands for, [n, k]."""

    def rows(self, rows: torch.Tensor) -> Self:
        """A copy of these rows."""

    def columns(self, columns: range) -> Self:
        """These columns. Raises UnshardableError where they cannot be cut out."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """A copy; dtype: of plain numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseExperts:
    """Plain matrices."""

    tensor: torch.Tensor
    """[experts, n, k], with any strides: a checkpoint may have stored [experts, k, n]."""

    @property
    def num_experts(self) -> int:
        return self.tensor.shape[0]

    @property
    def n(self) -> int:
        return self.tensor.shape[1]

    @property
    def k(self) -> int:
        return self.tensor.shape[2]

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor[expert].to(dtype)

    def rows(self, rows: torch.Tensor) -> DenseExperts:
        return DenseExperts(self.tensor[:, rows])

    def columns(self, columns: range) -> DenseExperts:
        return DenseExperts(self.tensor[:, :, columns.start : columns.stop])

    def to(self, device: torch.device, dtype: torch.dtype) -> DenseExperts:
        return DenseExperts(self.tensor.to(device, dtype, copy=True))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertProjection:
    """x·Wᵀ + bias, by the matrix and the bias of an expert."""

    weight: ExpertWeight
    bias: torch.Tensor | None
    """[experts, n], contiguous; None: there is none."""
