"""Weights that are still in the files of a checkpoint: a rank reads only its shard.

Used by the description of a model that is split among ranks, and by sharding. Invariants: the pieces are mapped files
or host memory, in the checkpoint's type, and not read before `rows`, `columns` or `to`; those return dense weights in
the model's dtype, or weights quantised from that, which share no memory with a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from .dense import DenseWeight, Quantization, QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """Matrices of the same width, stacked by rows."""

    pieces: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    """The model's."""
    quantization: Quantization | None = None
    """Of the resulting weights."""

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
        return replace(self, pieces=tuple(parts))

    def joined(self, other: StoredWeight) -> StoredWeight | None:
        alike = self.k == other.k and self.dtype == other.dtype and self.quantization == other.quantization
        return self.above(other) if alike else None

    def rows(self, rows: torch.Tensor) -> DenseWeight | QuantizedWeight:
        """rows: ascending numbers."""
        parts, first = [], 0
        for piece in self.pieces:
            own = rows[(rows >= first) & (rows < first + piece.shape[0])] - first
            parts.append(piece[own])
            first += piece.shape[0]
        return self._made(parts)

    def columns(self, columns: range) -> DenseWeight | QuantizedWeight:
        return self._made([piece[:, columns.start : columns.stop] for piece in self.pieces])

    def above(self, other: StoredWeight) -> StoredWeight:
        return replace(self, pieces=self.pieces + other.pieces)

    def to(self, device: torch.device) -> DenseWeight | QuantizedWeight:
        """The whole matrix."""
        return self._made(self.pieces).to(device)

    def _made(self, parts: Sequence[torch.Tensor]) -> DenseWeight | QuantizedWeight:
        whole = torch.cat([part.to(self.dtype) for part in parts])
        return DenseWeight(whole) if self.quantization is None else QuantizedWeight.of(whole, self.quantization)


class StoredLinear(nn.Module):
    """Replaces an nn.Linear in a description; cannot compute."""

    def __init__(self, stored: StoredWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.stored = stored
        self.bias = bias


def mapped_tensors(files: Iterable[Path]) -> Mapping[str, torch.Tensor]:
    """All tensors by name, as views of the mapped files, which are never written to; data is read on first use. Raises
    SafetensorError or OSError."""
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors
