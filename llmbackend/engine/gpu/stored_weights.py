"""Weights that are still in the checkpoint's files: a rank reads of them only what it cuts out.

For: the description of a model that is split over ranks, and what cuts it. Does not know: files, models, ranks.
Invariants: the pieces are mapped files or host memory, in the checkpoint's own type, and nothing is read of them before
`rows`, `columns` or `to`; what those give is dense, in the model's dtype, and shares no memory with a file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .weights import DenseWeight


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """Matrices of one width, one above the other."""

    pieces: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    """The model's."""

    @property
    def n(self) -> int:
        return sum(piece.shape[0] for piece in self.pieces)

    @property
    def k(self) -> int:
        return self.pieces[0].shape[1]

    def part(self, start: int, n: int) -> StoredWeight:
        parts, first = [], 0
        for piece in self.pieces:
            begin, end = max(start - first, 0), min(start + n - first, piece.shape[0])
            if begin < end:
                parts.append(piece[begin:end])
            first += piece.shape[0]
        return StoredWeight(tuple(parts), self.dtype)

    def joined(self, other: StoredWeight) -> StoredWeight | None:
        return self.above(other) if self.k == other.k and self.dtype == other.dtype else None

    def rows(self, rows: torch.Tensor) -> DenseWeight:
        """Rising numbers."""
        parts, first = [], 0
        for piece in self.pieces:
            own = rows[(rows >= first) & (rows < first + piece.shape[0])] - first
            parts.append(piece[own].to(self.dtype))
            first += piece.shape[0]
        return DenseWeight(torch.cat(parts))

    def columns(self, columns: range) -> DenseWeight:
        return DenseWeight(torch.cat([piece[:, columns.start : columns.stop].to(self.dtype) for piece in self.pieces]))

    def above(self, other: StoredWeight) -> StoredWeight:
        return StoredWeight(self.pieces + other.pieces, self.dtype)

    def to(self, device: torch.device) -> DenseWeight:
        """The whole of it."""
        return DenseWeight(torch.cat([piece.to(self.dtype) for piece in self.pieces]).to(device))


class StoredLinear(nn.Module):
    """In the place of an nn.Linear, for a description; it computes nothing."""

    def __init__(self, stored: StoredWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.stored = stored
        self.bias = bias
