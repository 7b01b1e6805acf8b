"""Matrices of 4-bit numbers in groups, each with a scale: one layout for all checkpoint formats.

Used by the loader, and by programs and modules that multiply by the loaded weights. The numbers of a row are in blocks
of 2 * slab columns, padded with zeros: byte j of a block contains number j of the block in its low nibble and number
slab + j in its high nibble. Invariants: the matrix is (number - zero) * scale, with the scale of the checkpoint, or, in
4-bit floats (mxfp4), the e2m1 value times a power of two; a slab lies within one group. Splitting, joining or selecting
columns never changes the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ...errors import UnshardableError
from .dense import Matmul, Rows, follows

MIN_GROUP = 32
"""Sizes of groups are multiples of this."""
PLAIN_ZERO = 8
"""The zero point of weights that store none."""
E8M0_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 bit patterns of e2m1."""


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A matrix [n, k]. Groups are of columns."""

    data: torch.Tensor
    """uint8 [n, blocks * slab]"""
    scale: torch.Tensor
    """[groups, n], any float type, with contiguous rows."""
    zero: torch.Tensor | None
    """uint8 [groups, n], with the scale's stride; None = 8 everywhere."""
    k: int
    group_size: int
    """A multiple of 32; k or more = there is one group. The last group may be smaller."""
    exact: bool = False
    """Whether the product of a row must not depend on how many rows there are."""
    is_float: bool = False
    """Whether numbers are e2m1 (a sign, two bits of exponent, one of fraction) and scales, uint8, are e8m0 (exponents
    of 2, plus 127), without zeros."""

    @classmethod
    def of(
        cls,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group_size: int,
        exact: bool = False,
        is_float: bool = False,
    ) -> Int4Weight:
        """numbers uint8 [n, k] in 0 … 15; scale, zero [n, groups]; group_size: k or more for one group."""
        k = numbers.shape[1]
        if group_size >= k:
            group_size = -(-k // 64) * 64
        zeros = None if zero is None else zero.to(torch.uint8).t().contiguous()
        return cls(_pack(numbers, _slab(group_size)), scale.t().contiguous(), zeros, k, group_size, exact, is_float)

    @property
    def n(self) -> int:
        return self.data.shape[0]

    @property
    def slab(self) -> int:
        return _slab(self.group_size)

    @property
    def input_dtype(self) -> torch.dtype | None:
        return None

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor), "a weight of 4 bits multiplies rows in the model's dtype"
        if not has_kernel(self.data.device):
            out.copy_(functional.linear(x, self.dense(x.dtype), bias))
            return
        from ..kernels.matmul import int4_matmul  # imports Triton, which only GPU builds of torch include

        parts = self.data, self.scale, self.zero, self.group_size, self.slab
        int4_matmul(x, *parts, bias, out, self.exact, self.is_float)

    def numbers(self) -> torch.Tensor:
        """uint8 [n, k]"""
        low, high = (half.view(self.n, -1, self.slab) for half in (self.data & 15, self.data >> 4))
        return torch.stack((low, high), dim=2).view(self.n, -1)[:, : self.k]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [n, k], computed in float32."""
        group = torch.arange(self.k, device=self.data.device) // self.group_size
        if self.is_float:
            values = torch.tensor(_E2M1, device=self.data.device)[self.numbers().int()]
            return torch.ldexp(values, self.scale.t()[:, group].int() - E8M0_BIAS).to(dtype)
        whole = self.numbers().float()
        whole -= PLAIN_ZERO if self.zero is None else self.zero.t()[:, group].float()
        return (whole * self.scale.t()[:, group].float()).to(dtype)

    def part(self, start: int, n: int) -> Int4Weight:
        zero = None if self.zero is None else self.zero[:, start : start + n]
        return replace(self, data=self.data[start : start + n], scale=self.scale[:, start : start + n], zero=zero)

    def joined(self, other: Int4Weight) -> Int4Weight | None:
        """As DenseWeight.joined."""
        if (self.k, self.group_size) != (other.k, other.group_size) or not follows(other.data, self.data):
            return None
        n, groups, stride = self.n + other.n, self.scale.shape[0], self.scale.stride(0)
        zero = None if self.zero is None else self.zero.as_strided((groups, n), (stride, 1))
        scale = self.scale.as_strided((groups, n), (stride, 1))
        row_bytes = self.data.shape[1]
        return replace(self, data=self.data.as_strided((n, row_bytes), (row_bytes, 1)), scale=scale, zero=zero)

    def rows(self, rows: torch.Tensor) -> Int4Weight:
        zero = None if self.zero is None else self.zero[:, rows]
        return replace(self, data=self.data[rows], scale=self.scale[:, rows], zero=zero)

    def columns(self, columns: range) -> Int4Weight:
        """Groups that are cut become smaller ones. Raises UnshardableError if they would not be multiples of 32."""
        size = self._group_size_of(columns)
        group = torch.arange(columns.start, columns.stop, size, device=self.data.device) // self.group_size
        zero = None if self.zero is None else self.zero[group].t()
        numbers = self.numbers()[:, columns.start : columns.stop]
        return Int4Weight.of(numbers, self.scale[group].t(), zero, size, self.exact, self.is_float)

    def above(self, other: Int4Weight) -> Int4Weight:
        return Int4Weight.stacked([self, other])

    @staticmethod
    def stacked(weights: Sequence[Int4Weight]) -> Int4Weight:
        """A copy of all of them, stacked by rows."""
        assert len({(each.k, each.group_size) for each in weights}) == 1, "neighbours are in groups of one size"
        zero = None
        if any(each.zero is not None for each in weights):
            zero = torch.cat([each._zeros() for each in weights], dim=1)
        data, scale = torch.cat([each.data for each in weights]), torch.cat([each.scale for each in weights], dim=1)
        return replace(weights[0], data=data, scale=scale, zero=zero)

    def to(self, device: torch.device) -> Int4Weight:
        zero = None if self.zero is None else self.zero.to(device)
        return replace(self, data=self.data.to(device), scale=self.scale.to(device), zero=zero)

    def _zeros(self) -> torch.Tensor:
        return torch.full_like(self.scale, PLAIN_ZERO, dtype=torch.uint8) if self.zero is None else self.zero

    def _group_size_of(self, columns: range) -> int:
        if self.group_size >= self.k:
            return len(columns)
        inner = [place for place in (columns.start, columns.stop) if place < self.k]
        size = math.gcd(self.group_size, *inner)
        if size % MIN_GROUP:
            raise UnshardableError(
                f"engine argument 'tensor_parallel_size' splits a 4-bit matrix of {self.k} columns at {inner}, "
                f"expected multiples of {MIN_GROUP} columns because its groups have {self.group_size}"
            )
        return size


def has_kernel(device: torch.device) -> bool:
    """Without it, a matrix is dequantized for each product: in tests, and for models that are probed before they
    run."""
    return device.type == "cuda"


def _slab(group_size: int) -> int:
    return 64 if group_size % 64 == 0 else MIN_GROUP


def _pack(numbers: torch.Tensor, slab: int) -> torch.Tensor:
    padded = functional.pad(numbers, (0, -numbers.shape[1] % (2 * slab))).contiguous()
    blocks = padded.view(len(padded), -1, 2, slab)
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1)
