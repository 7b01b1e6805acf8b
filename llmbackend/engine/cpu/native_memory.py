"""Memory of an engine on CPU: KV blocks in the layout of the native kernels, and pages of mapped weights.

Used by the native program, native attention in modules, and linear layers that pack their weights. Invariants: a
block's pages are committed when first written; released pages are still in their file.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..kernels.library import KernelLibrary
from ..kernels.operations import Type
from ..kv_groups import KVGroups
from ..step import Int32Array

logger = logging.getLogger(__name__)


def release_pages(address: int, size_bytes: int) -> None:
    """Returns the whole pages of memory that is not read again to the system.

    For weights mapped from a file, which would otherwise stay resident next to their packed form until all are packed.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and end > start:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


class FilePages:
    """Limits how much of a mapped file is resident in this process.

    Released pages stay in the page cache and return within a microsecond. Each row that is read brings in its
    neighbours, so without the limit a whole embedding would be resident after some thousand different tokens.
    """

    LIMIT_BYTES: Final = 16 << 20
    _ROWS_PER_CHECK: Final = 64

    def __init__(self, pages: npt.NDArray[np.uint8]) -> None:
        """pages: of a file, never written to"""
        self._pages = pages
        self._rows_left = self._ROWS_PER_CHECK
        self._others_bytes = _file_bytes()
        """Resident bytes of other files, such as libraries."""

    def read(self, num_rows: int) -> None:
        """Accounts for `num_rows` further reads."""
        self._rows_left -= num_rows
        if self._rows_left > 0:
            return
        self._rows_left = self._ROWS_PER_CHECK
        if _file_bytes() - self._others_bytes > self.LIMIT_BYTES:
            release_pages(int(self._pages.ctypes.data), len(self._pages))
            self._others_bytes = _file_bytes()


def _file_bytes() -> int:
    """Resident file pages of this process; 0 = unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0


BLOCK_MULTIPLE: Final = 32
HEAD_MULTIPLE: Final = 32
DEFAULT_KV_BYTES: Final = 1 << 30
_MAX_EMPTY_BLOCKS: Final = 1 << 18
"""For models without attention, whose blocks occupy memory only in their tables."""
TYPE_BYTES: Final = {Type.FLOAT32: 4, Type.BFLOAT16: 2, Type.FIXED16: 2}


def can_hold(key_dim: int, value_dim: int, block_size: int) -> bool:
    """Whether heads of these sizes fit the native layout. value_dim: 0 = values are part of the keys."""
    return value_dim in (0, key_dim) and key_dim % HEAD_MULTIPLE == 0 and block_size % BLOCK_MULTIPLE == 0


class LayerKV(NamedTuple):
    """The shape of one layer's keys and values."""

    num_kv_heads: int
    head_dim: int
    has_values: bool = True
    """Otherwise values are part of the keys."""

    @property
    def parts(self) -> int:
        return 1 + self.has_values

    def type(self, library: KernelLibrary, model_type: Type) -> Type:
        """Fixed point has one scale per key, which leaves too few bits for a part of it that is a value."""
        return library.kv_type(model_type) if self.has_values else model_type


@dataclass(frozen=True, slots=True)
class NativeLayerCache:
    """One layer's keys and values. `keys` and `values` are addresses (layouts: native/step.h, RotaryOp); values is None
    if they are part of the keys."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    type: Type
    keys: int
    values: int | None


class NativeKVMemory:
    """KV memory for the layers of one block; layers at the same place in blocks of different groups share it.

    If layers are alike, a block's keys and values of all layers are contiguous, and the kernels get block ids that
    count individual parts of layers. An engine with few blocks in use then has few pages in use, even huge ones.
    Otherwise each layer has its own memory.
    """

    def __init__(
        self, library: KernelLibrary, shapes: Sequence[LayerKV], num_blocks: int, block_size: int, model_type: Type
    ) -> None:
        """model_type: float32 or bfloat16. Raises MemoryError."""
        self.block_size = block_size
        self._scale = 1
        """Kernel block ids per block."""
        types = [shape.type(library, model_type) for shape in shapes]
        sizes = [
            shape.num_kv_heads * shape.head_dim * block_size * TYPE_BYTES[kind]
            for shape, kind in zip(shapes, types, strict=True)
        ]
        """For each layer: bytes of a block's keys, and of its values."""
        parts = [shape.parts for shape in shapes]
        # An odd number of parts, so a layer's blocks are spread over the sets of a cache.
        interleaved = sum(parts) + 1 - sum(parts) % 2
        if len(set(shapes)) == 1 and num_blocks * interleaved * block_size < 2**31:
            self._scale = interleaved
            self.memory = library.memory(num_blocks * interleaved * sizes[0])
        else:
            sizes = [num_blocks * size for size in sizes]
            self.memory = library.memory(sum(count * size for count, size in zip(parts, sizes, strict=True)))
        ends = accumulate(map(operator.mul, parts, sizes), initial=int(self.memory.ctypes.data))
        self.layers = tuple(
            NativeLayerCache(*shape[:2], block_size, kind, begin, begin + size if shape.has_values else None)
            for shape, kind, size, begin in zip(shapes, types, sizes, ends, strict=False)
        )

    def kernels_blocks(self, block_table: Int32Array) -> Int32Array:
        """Converts block ids to those of the kernels."""
        return block_table * np.int32(self._scale)

    def kernels_slots(self, slots: Int32Array) -> Int32Array:
        """Converts slots to those of the kernels."""
        return slots + slots // np.int32(self.block_size) * np.int32((self._scale - 1) * self.block_size)


def check_kv_dtype(config: EngineConfig) -> None:
    """For everything but a program on an accelerator. Raises ValueError."""
    if config.kv_cache_dtype != "auto":
        raise ValueError(
            f"engine argument 'kv_cache_dtype' is '{config.kv_cache_dtype}', expected 'auto': only the accelerator "
            "path keeps keys and values in 8 bits"
        )


def num_kv_blocks(config: EngineConfig, bytes_per_token: int, max_model_len: int, groups: KVGroups = KVGroups()) -> int:
    """How many KV blocks the engine has; at least one request of a given max_model_len fits. bytes_per_token: of the
    layers of one block. Raises ValueError if it does not fit the given memory, or if no block does."""
    check_kv_dtype(config)
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = config.block_size * bytes_per_token
    needed = groups.count
    if config.given_max_model_len is not None:  # small chunks need fewer blocks of windows, but take longer
        chunk_tokens = 1 if config.kv_cache_memory_bytes else config.max_num_batched_tokens
        needed = groups.max_blocks(max_model_len, chunk_tokens, config.block_size)
    memory_bytes = config.kv_cache_memory_bytes or max(DEFAULT_KV_BYTES, needed * block_bytes)
    num_blocks = memory_bytes // block_bytes if block_bytes else max(needed, _MAX_EMPTY_BLOCKS)
    if num_blocks < needed:
        raise ValueError(
            f"engine argument 'kv_cache_memory_bytes' is {memory_bytes}, expected at least {needed * block_bytes}: "
            f"one request of {config.given_max_model_len or config.block_size} tokens"
        )
    usable = config.max_num_seqs * groups.count * -(-max_model_len // config.block_size)
    if config.kv_cache_memory_bytes and num_blocks > usable:
        logger.warning(
            "'kv_cache_memory_bytes' is %d, of which %d are used: %d requests (max_num_seqs) of %d tokens need no more",
            *(memory_bytes, usable * block_bytes, config.max_num_seqs, max_model_len),
        )
    return min(num_blocks, usable)
