"""Packed weights: where the matrix of a linear layer is in native memory.

For: the loader, which packs every linear layer of a model, and the operations that read them. Does not know: modules or
layers. Invariant: matrices packed one after the other are adjacent, so that neighbours of whole panels (query, key,
value) are one matrix without being copied together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from .library import PANEL, NativeKernels, Type, packed_bytes

TYPE_OF = {torch.float32: Type.FLOAT32, torch.bfloat16: Type.BFLOAT16}
_ALIGN_BYTES = 64
NewMemory = Callable[[int], npt.NDArray[np.uint8] | None]
"""Returns this many bytes of zeros, or None: the caller allocates its own."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [n, k] in panels (native/step.h, LinearOp), by its addresses."""

    address: int
    n: int
    k: int
    type: Type
    scale: int = 0
    """Address of float32 [n]; 0 unless type is INT8."""
    sums: int = 0
    """Address of int32 [n]; 0 unless type is INT8."""
    memory: object = field(default=None, compare=False, repr=False)
    """Keeps the addresses valid."""

    @property
    def size_bytes(self) -> int:
        return packed_bytes(self.n, self.k, self.type)

    def part(self, start: int, n: int) -> PackedWeight:
        """Rows start .. start + n - 1 of the matrix; `start` is a multiple of the panel width."""
        assert start % PANEL == 0 and start + n <= self.n, f"rows {start} to {start + n} of {self.n} are not panels"
        offset = packed_bytes(start, self.k, self.type)
        scale, sums = (address and address + 4 * start for address in (self.scale, self.sums))
        return dataclasses.replace(self, address=self.address + offset, n=n, scale=scale, sums=sums)

    def joined(self, other: PackedWeight) -> PackedWeight | None:
        """This matrix with the rows of the other below; None unless they are adjacent in memory."""
        scale, sums = (address and address + 4 * self.n for address in (self.scale, self.sums))
        behind = (self.address + self.size_bytes, scale, sums, self.k, self.type)
        if self.n % PANEL or (other.address, other.scale, other.sums, other.k, other.type) != behind:
            return None
        return dataclasses.replace(self, n=self.n + other.n)


class WeightStore:
    """Memory for all packed weights of a model and the small arrays beside them, reserved at once.

    It is filled in this order: panels of all matrices, their scales, their sums, other arrays. `memory` is uint8, and
    takes memory only where it is filled."""

    def __init__(
        self, kernels: NativeKernels, shapes: list[tuple[int, int, Type]], extra_bytes: int = 0,
        new_memory: NewMemory | None = None,
    ) -> None:  # fmt: skip
        """shapes: (n, k, type) of every matrix that will be packed. extra_bytes: the most for other arrays. new_memory:
        is tried first. Raises MemoryError."""
        self._kernels = kernels
        panels = sum(packed_bytes(*shape) for shape in shapes)
        self._per_row = sum(_aligned(4 * n) for n, _, kind in shapes if kind == Type.INT8)
        """Bytes of all scales, and of all sums."""
        self._end = panels + 2 * self._per_row
        memory = None if new_memory is None else new_memory(self._end + extra_bytes)
        self.memory = kernels.library.memory(self._end + extra_bytes) if memory is None else memory
        self._next = int(self.memory.ctypes.data)
        self._next_scale = self._next + panels

    @property
    def used(self) -> npt.NDArray[np.uint8]:
        """The memory up to its last array."""
        return self.memory[: self._end]

    def pack(self, matrix: torch.Tensor, packed_type: Type) -> PackedWeight:
        """Packs a float32 or bfloat16 matrix [n, k], rows contiguous or not."""
        matrix = matrix.detach()
        if matrix.stride(1) != 1:
            matrix = matrix.contiguous()
        n, k = matrix.shape
        scale = self._next_scale if packed_type == Type.INT8 else 0
        packed = PackedWeight(self._next, n, k, packed_type, scale, scale and scale + self._per_row, self.memory)
        self._kernels.pack(
            matrix.data_ptr(), TYPE_OF[matrix.dtype], (n, k), matrix.stride(0), packed.address, packed_type,
            packed.scale, packed.sums,
        )  # fmt: skip
        self._next += packed.size_bytes
        self._next_scale += _aligned(4 * n) if scale else 0
        return packed

    def add(self, array: npt.NDArray[np.uint8]) -> int:
        """Copies a small array behind the others and returns its offset in bytes. Raises MemoryError when there is no
        room."""
        begin = _aligned(self._end)
        if begin + len(array) > len(self.memory):
            raise MemoryError(f"{len(array)} bytes do not fit into the memory of packed weights")
        self._end = begin + len(array)
        self.memory[begin : self._end] = array
        return begin


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
