"""Matrices of the experts of a layer, in the formats that programs multiply by.

Used by descriptions, programs, and sharding. Invariants: all experts of a layer are in one allocation shared by modules
and programs; rows and columns are those of each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import nn
from torch.nn import functional

from .int4 import Int4Weight


class ExpertWeight(Protocol):
    """A matrix [n, k] for each expert."""

    @property
    def num_experts(self) -> int: ...

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Dense [n, k]."""

    def rows(self, rows: torch.Tensor) -> Self:
        """A copy of these rows of each expert."""

    def columns(self, columns: range) -> Self:
        """These columns. Raises UnshardableError if they cannot be separated."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """A copy; dtype: of dense matrices."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseExperts:
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
class Int4Experts:
    """Matrices of 4-bit numbers, stacked by rows."""

    whole: Int4Weight
    """[experts * n, k]"""
    num_experts: int

    @property
    def n(self) -> int:
        return self.whole.n // self.num_experts

    @property
    def k(self) -> int:
        return self.whole.k

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return self.whole.part(expert * self.n, self.n).dense(dtype)

    def rows(self, rows: torch.Tensor) -> Int4Experts:
        first = torch.arange(self.num_experts)[:, None] * self.n
        return Int4Experts(self.whole.rows((first + rows).flatten()), self.num_experts)

    def columns(self, columns: range) -> Int4Experts:
        return Int4Experts(self.whole.columns(columns), self.num_experts)

    def to(self, device: torch.device, dtype: torch.dtype) -> Int4Experts:
        return Int4Experts(self.whole.to(device), self.num_experts)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertProjection:
    """x·Wᵀ + bias, with an expert's matrix and bias."""

    weight: ExpertWeight
    bias: torch.Tensor | None
    """[experts, n], contiguous; None = none."""


class QuantizedExperts(nn.Module):
    """Replaces the experts of transformers: one expert after the other, dequantized while it multiplies."""

    def __init__(
        self, gate_up: ExpertProjection, down: ExpertProjection, apply_gate: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Weights are on the device that multiplies. apply_gate: of the replaced module."""
        super().__init__()
        self._weights = {"gate_up_proj": gate_up.weight, "down_proj": down.weight}
        for name, bias in (("gate_up_proj_bias", gate_up.bias), ("down_proj_bias", down.bias)):
            self.register_parameter(name, None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._apply_gate = apply_gate

    def projection(self, name: str) -> ExpertProjection:
        """name: gate_up_proj or down_proj."""
        return ExpertProjection(self._weights[name], getattr(self, f"{name}_bias"))

    def drop_weights(self) -> None:
        """Frees the weights; nothing can be computed afterwards."""
        self._weights.clear()

    @torch.no_grad()
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The sum, over the experts that each token of x [tokens, width] selected, of their outputs times their shares;
        chosen, shares [tokens, top_k]."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(chosen).tolist():
            token, place = torch.where(chosen == expert)
            inner = self._apply_gate(self._multiplied(x[token], "gate_up_proj", expert))
            out = self._multiplied(inner, "down_proj", expert) * shares[token, place, None]
            total.index_add_(0, token, out.float())
        return total.to(x.dtype)

    def _multiplied(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        projection = self.projection(name)
        bias = None if projection.bias is None else projection.bias[expert]
        return functional.linear(x, projection.weight.matrix(expert, x.dtype), bias)
