"""A GGUF model's matrices in 4 bits as the file has them: Q4_0 and Q4_1.

For: the engine's packing. Does not know: layouts of kernels. Source: ggml's block_q4_0 and block_q4_1: of 32 weights of
a row a float16 scale, of Q4_1 a float16 minimum, and 16 bytes, whose lower halves are the first 16 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .families import ModelTensor, model_tensors
from .files import read_parts
from .rows import mapped_rows, row_order

GROUP: Final = 32
_HEAD_BYTES: Final = {"Q4_0": 2, "Q4_1": 4}
"""Of a block's scale, and minimum."""


class Matrix(NamedTuple):
    """scale * (number - 8), or with minima scale * number + min; of k in groups of GROUP."""

    numbers: npt.NDArray[np.uint8]
    """[n, k]"""
    scales: npt.NDArray[np.float16]
    """[n, k / GROUP]"""
    mins: npt.NDArray[np.float16] | None
    """As scales; of Q4_1."""


class FourBitMatrices:
    """Each is read when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises GgufError or OSError."""
        self._tensors = model_tensors(read_parts(files))

    @property
    def count(self) -> int:
        return sum(self.has_mins(name) is not None for name in self._tensors)

    def has_mins(self, name: str) -> bool | None:
        """None: the tensor of this name is not in 4 bits."""
        tensor = self._tensors.get(name)
        kind = "" if tensor is None else tensor.info.type.name
        return kind == "Q4_1" if kind in _HEAD_BYTES else None

    def read(self, name: str) -> Matrix:
        tensor = self._tensors[name]
        order = row_order(tensor)
        return Matrix(*(None if part is None else part[order] for part in _read(tensor)))  # type: ignore[arg-type]


def _read(tensor: ModelTensor) -> Matrix:
    head = _HEAD_BYTES[tensor.info.type.name]
    blocks = np.ascontiguousarray(mapped_rows(tensor)).reshape(tensor.num_rows, -1, head + GROUP // 2)
    heads = np.ascontiguousarray(blocks[:, :, :head]).view("<f2")
    halves = blocks[:, :, head:]
    numbers = np.concatenate((halves & 15, halves >> 4), axis=2).reshape(tensor.num_rows, -1)
    return Matrix(numbers, heads[:, :, 0], heads[:, :, 1] if head > 2 else None)
