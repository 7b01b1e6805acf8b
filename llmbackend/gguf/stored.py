"""A GGUF model's matrices as stored in the file, in types of 2 to 8 bits.

Used by the engine's packing. Invariant: rows and columns are in the model's order; a matrix whose blocks this order
would split is excluded. Source of Q4_0 and Q4_1: ggml's block_q4_0 and block_q4_1: for 32 weights of a row, a float16
scale, in Q4_1 a float16 minimum, and 16 bytes, whose low nibbles are the first 16 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .families import ModelTensor, tensors_of
from .rows import Bytes, blocks_fit, ordered_rows

GROUP: Final = 32
_HEAD_BYTES: Final = {"Q4_0": 2, "Q4_1": 4}
"""Bytes of a block's scale and minimum."""
_HEAD, _EMBEDDING = "lm_head.weight", "token_embd.weight"
"""The model's name of the head, the file's name of the embedding."""


class FourBitMatrix(NamedTuple):
    """scale * (number - 8), or with minima scale * number + min; groups of GROUP along k."""

    numbers: npt.NDArray[np.uint8]
    """[n, k]"""
    scales: npt.NDArray[np.float16]
    """[n, k / GROUP]"""
    mins: npt.NDArray[np.float16] | None
    """Shaped like scales; for Q4_1."""


class FileMatrices:
    """Each is read on demand. If the file has no output head, it is the embedding."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises GgufError or OSError."""
        self._tensors = tensors_of(files)
        embedding = (tensor for tensor in self._tensors.values() if tensor.name == _EMBEDDING)
        if _HEAD not in self._tensors and (found := next(embedding, None)) is not None:
            self._tensors[_HEAD] = found

    @property
    def count(self) -> int:
        layers = (name for name, tensor in self._tensors.items() if name != _HEAD and tensor.name != _EMBEDDING)
        return sum(self.type_of(name) is not None for name in layers)

    def type_of(self, name: str) -> str | None:
        """None = the tensor with this name is not a matrix in a type of 2 to 8 bits."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.info.type.is_plain or len(tensor.info.shape) < 2:
            return None
        types = {piece.info.type.name if blocks_fit(piece) else None for piece in tensor.pieces}
        return types.pop() if len(types) == 1 else None

    def blocks(self, name: str) -> Bytes:
        pieces = [ordered_rows(piece) for piece in self._tensors[name].pieces]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def four_bits(self, name: str) -> FourBitMatrix:
        """For Q4_0 and Q4_1."""
        return _four_bits(self._tensors[name], self.blocks(name))


def _four_bits(tensor: ModelTensor, rows: npt.NDArray[np.uint8]) -> FourBitMatrix:
    head = _HEAD_BYTES[tensor.info.type.name]
    blocks = rows.reshape(len(rows), -1, head + GROUP // 2)
    heads = np.ascontiguousarray(blocks[:, :, :head]).view("<f2")
    halves = blocks[:, :, head:]
    numbers = np.concatenate((halves & 15, halves >> 4), axis=2).reshape(len(rows), -1)
    return FourBitMatrix(numbers, heads[:, :, 0], heads[:, :, 1] if head > 2 else None)
