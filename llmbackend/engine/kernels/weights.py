"""Packed weights: where the matrices of linear layers are in native memory.

Used by the loader, which packs every linear layer of a model, and by the operations that read them. Invariant: matrices
packed one after the other are adjacent, so neighbours made of whole panels (query, key, value) form one matrix without
copying.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from .library import BLOCKS, GROUP, PANEL, NativeKernels, aligned, packed_bytes, scale_bytes, sums_bytes
from .operations import Type

TYPE_OF = {torch.float32: Type.FLOAT32, torch.bfloat16: Type.BFLOAT16}
_ZERO: Final = 8
"""The zero point of INT4."""
NEIGHBOURS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers with the same input, by their names in transformers, in the order in which programs need their outputs."""
NewMemory = Callable[[int], npt.NDArray[np.uint8] | None]
"""Returns this many zeroed bytes, or None = the caller allocates its own."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [n, k] in panels (native/step.h, LinearOp), by its addresses."""

    address: int
    n: int
    k: int
    type: Type
    scale: int = 0
    """Address of the scales (library.scale_bytes); 0 = none."""
    sums: int = 0
    """Address of the sums, minima or zero points (library.sums_bytes); 0 = none."""
    order: int = 0
    """Address of the permutation of x's columns, int32 [k] ([experts, k]); 0 = none. Only for 4-bit weights."""
    memory: object = field(default=None, compare=False, repr=False)
    """Keeps the addresses valid."""

    @property
    def size_bytes(self) -> int:
        return packed_bytes(self.n, self.k, self.type)

    def part(self, start: int, n: int) -> PackedWeight:
        """Rows start .. start + n - 1 of the matrix; `start` is a multiple of the panel width."""
        assert start % PANEL == 0 and start + n <= self.n, f"rows {start} to {start + n} of {self.n} are not panels"
        return self._from(start, n)

    def joined(self, other: PackedWeight) -> PackedWeight | None:
        """This matrix with the rows of the other appended; None unless they are adjacent in memory."""
        if self.n % PANEL or other != self._from(self.n, other.n):
            return None
        return dataclasses.replace(self, n=self.n + other.n)

    def _from(self, start: int, n: int) -> PackedWeight:
        """n rows of this matrix, from row `start` on."""
        shape = (start, self.k, self.type)
        return dataclasses.replace(
            self,
            n=n,
            address=self.address + packed_bytes(*shape),
            scale=self.scale and self.scale + scale_bytes(*shape),
            sums=self.sums and self.sums + sums_bytes(*shape),
        )


@dataclass(frozen=True, slots=True, eq=False)
class FourBits:
    """A 4-bit matrix [n, k] as a checkpoint stores it: scale * (number - 8); with minima, scale * number + min; with
    zero points, scale * (number - zero). Groups have GROUP columns; the last may have fewer."""

    numbers: npt.NDArray[np.uint8]
    """[n, k]"""
    scales: npt.NDArray[np.float16]
    """[n, groups]"""
    mins: npt.NDArray[np.float16] | None
    """Shaped like scales."""
    zeros: npt.NDArray[np.uint8] | None = None
    """Shaped like scales."""
    order: npt.NDArray[np.int32] | None = None
    """[k]: column i multiplies input order[i]; None = input i."""

    def values(self) -> npt.NDArray[np.float32]:
        """The dequantized values, [n, k]."""
        groups = np.arange(self.numbers.shape[1]) // GROUP
        numbers, scales = self.numbers.astype(np.float32), self.scales.astype(np.float32)[:, groups]
        if self.mins is not None:
            in_order = numbers * scales + self.mins.astype(np.float32)[:, groups]
        else:
            in_order = (numbers - (_ZERO if self.zeros is None else self.zeros[:, groups])) * scales
        if self.order is None:
            return in_order
        values = np.empty_like(in_order)
        values[:, self.order] = in_order
        return values

    def outputs(self, rows: npt.NDArray[Any]) -> FourBits:
        """The matrix with only these rows."""
        mins, zeros = (None if each is None else each[rows] for each in (self.mins, self.zeros))
        return FourBits(self.numbers[rows], self.scales[rows], mins, zeros, self.order)

    def offsets(self, kind: Type) -> npt.NDArray[Any] | None:
        """Minima or zero points as a matrix of this type stores them; it may have zero points even if this one has
        none."""
        if kind is Type.INT4_ZERO and self.zeros is None:
            return np.full(self.scales.shape, _ZERO, np.uint8)
        return self.zeros if kind is Type.INT4_ZERO else self.mins

    def panels(self) -> npt.NDArray[np.uint8]:
        """The numbers in the order of native/step.h, uint8 [panels, k / 8, PANEL, 4]."""
        n, k = self.numbers.shape
        padded = np.zeros((-(-n // PANEL) * PANEL, -(-k // 64) * 64), np.uint8)
        padded[:n, :k] = self.numbers
        quads = padded.reshape(-1, PANEL, padded.shape[1] // 8, 2, 4)
        return np.asarray((quads[:, :, :, 0] | quads[:, :, :, 1] << 4).transpose(0, 2, 1, 3))

    def by_panel(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Scales, minima or zero points in the order of native/step.h, [panels, groups, PANEL]."""
        n, k = self.numbers.shape
        padded = np.zeros((-(-n // PANEL) * PANEL, -(-k // 64) * 64 // GROUP), values.dtype)
        padded[:n, : values.shape[1]] = values
        return padded.reshape(-1, PANEL, padded.shape[1]).transpose(0, 2, 1)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """A matrix [n, k] as a GGUF file stores it."""

    type: Type
    """One of BLOCKS."""
    blocks: npt.NDArray[np.uint8]
    """[n, bytes of k / BLOCKS[type].k blocks], contiguous."""

    @property
    def shape(self) -> tuple[int, int]:
        n, size_bytes = self.blocks.shape
        return n, size_bytes // BLOCKS[self.type].file_bytes * BLOCKS[self.type].k


class WeightStore:
    """Memory for all packed weights of a model and its small arrays, reserved at once.

    It is filled in this order: panels of all matrices, their scales, their sums, other arrays. `memory` is uint8; its
    pages are committed as it is filled.
    """

    def __init__(
        self, kernels: NativeKernels, shapes: list[tuple[int, int, Type]], extra_bytes: int = 0,
        new_memory: NewMemory | None = None,
    ) -> None:  # fmt: skip
        """shapes: (n, k, type) of every matrix to be packed. extra_bytes: limit for other arrays. new_memory: tried
        first. Raises MemoryError."""
        self._kernels = kernels
        panels = sum(packed_bytes(*shape) for shape in shapes)
        scales = sum(aligned(scale_bytes(*shape)) for shape in shapes)
        self._end = panels + scales + sum(aligned(sums_bytes(*shape)) for shape in shapes)
        memory = None if new_memory is None else new_memory(self._end + extra_bytes)
        self.memory = kernels.library.memory(self._end + extra_bytes) if memory is None else memory
        self._next = int(self.memory.ctypes.data)
        self._next_scale = self._next + panels
        self._next_sums = self._next_scale + scales
        self._orders: dict[bytes, int] = {}
        """Their addresses."""

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
        packed = self._reserve(n, k, packed_type)
        self._kernels.pack(
            matrix.data_ptr(), TYPE_OF[matrix.dtype], (n, k), matrix.stride(0), packed.address, packed_type,
            packed.scale, packed.sums,
        )  # fmt: skip
        return packed

    def pack_four_bits(self, matrix: FourBits, kind: Type) -> PackedWeight:
        """Stores every number, scale, minimum and zero point unchanged."""
        n, k = matrix.numbers.shape
        packed = self._reserve(n, k, kind)
        self._write(packed.address, matrix.panels())
        self._write(packed.scale, matrix.by_panel(matrix.scales))
        if (offsets := matrix.offsets(kind)) is not None:
            self._write(packed.sums, matrix.by_panel(offsets))
        return packed if matrix.order is None else dataclasses.replace(packed, order=self.add_order(matrix.order))

    def add_order(self, order: npt.NDArray[np.int32]) -> int:
        """The address of a copy; equal permutations are shared."""
        data = order.tobytes()
        if data not in self._orders:
            self._orders[data] = int(self.memory.ctypes.data) + self.add(np.frombuffer(data, np.uint8))
        return self._orders[data]

    def pack_blocks(self, matrix: StoredBlocks) -> PackedWeight:
        """Stores every number, scale and minimum unchanged."""
        packed = self._reserve(*matrix.shape, matrix.type)
        self._kernels.pack_blocks(matrix.blocks.ctypes.data, matrix.type, matrix.shape, packed.address)
        return packed

    def _write(self, address: int, array: npt.NDArray[Any]) -> None:
        begin = address - int(self.memory.ctypes.data)
        self.memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array

    def _reserve(self, n: int, k: int, packed_type: Type) -> PackedWeight:
        num_scale, num_sums = scale_bytes(n, k, packed_type), sums_bytes(n, k, packed_type)
        scale, sums = self._next_scale if num_scale else 0, self._next_sums if num_sums else 0
        packed = PackedWeight(self._next, n, k, packed_type, scale, sums, memory=self.memory)
        self._next += packed.size_bytes
        self._next_scale += aligned(num_scale)
        self._next_sums += aligned(num_sums)
        return packed

    def add(self, array: npt.NDArray[np.uint8]) -> int:
        """Appends a small array and returns its offset in bytes. Raises MemoryError if there is no room."""
        begin = aligned(self._end)
        if begin + len(array) > len(self.memory):
            raise MemoryError(f"{len(array)} bytes do not fit into the memory of packed weights")
        self._end = begin + len(array)
        self.memory[begin : self._end] = array
        return begin
