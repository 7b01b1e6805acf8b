"""Rows of activations in native memory.

Invariant: memory is zeroed, and committed only when first written.
"""

from __future__ import annotations

import copy
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kernels.library import KernelLibrary
from ..kernels.operations import Type

Float32Array = npt.NDArray[np.float32]

# Rows a multiple of 4 KiB apart would compete for the same few sets of the L1 cache.
_ROW_PADDING: Final = 16
_TILE_ROWS: Final = 16
_TILE_COLUMNS: Final = 32


class Buffer:
    """Rows of float32 or bfloat16 in native memory, or tiles of bfloat16."""

    def __init__(self, library: KernelLibrary, rows: int, width: int, kind: Type) -> None:
        self.stride = -(-width // 16) * 16 + _ROW_PADDING
        if kind is Type.BFLOAT16_TILES:
            self.stride = -(-width // _TILE_COLUMNS) * _TILE_COLUMNS
            rows = -(-rows // _TILE_ROWS) * _TILE_ROWS
        self.type = kind
        self._memory = library.memory(rows * self.stride * (4 if kind is Type.FLOAT32 else 2))
        self.address = int(self._memory.ctypes.data)

    def from_column(self, column: int) -> Buffer:
        """The columns from this one on; float32 only."""
        part = copy.copy(self)
        part.address += 4 * column
        return part

    def floats(self, rows: int, width: int) -> Float32Array:
        """The first rows of a float32 buffer."""
        return self._memory.view(np.float32).reshape(-1, self.stride)[:rows, :width]
