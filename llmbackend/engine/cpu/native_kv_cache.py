"""Paged KV memory in the layout of the native attention.

For: operations that write or read it. Does not know: which request owns a block. Invariant: what is stored is finite
(the kernel that writes sees to it), so a broken request's leftovers cannot turn into NaN in another's output.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from llmbackend.engine.attention.kv_cache import LayerShape
from llmbackend.engine.kernels.abi import Type
from llmbackend.engine.kernels.library import Library, NativeEngine
from llmbackend.engine.kernels.weights import TYPE_OF

BLOCK_MULTIPLE = 32


def native_caches(
    engine: NativeEngine, shapes: Mapping[nn.Module, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype
) -> dict[nn.Module, NativeLayerCache] | None:
    """Memory for each layer, or None when one of them has no place in the native layout. Raises MemoryError."""
    if not all(can_hold(shape, block_size, dtype) for shape in shapes.values()):
        return None
    return {
        module: NativeLayerCache(engine.library, shape, num_blocks, block_size, dtype)
        for module, shape in shapes.items()
    }


def can_hold(shape: LayerShape, block_size: int, dtype: torch.dtype) -> bool:
    """Whether the native layout has a place for such a layer."""
    return (
        shape.key_dim == shape.value_dim
        and shape.key_dim % 32 == 0
        and block_size % BLOCK_MULTIPLE == 0
        and dtype in TYPE_OF
    )


class NativeLayerCache:
    """One layer's keys and values; `keys` and `values` are addresses (layouts: native/step.h, RotaryOp)."""

    def __init__(
        self, library: Library, shape: LayerShape, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        """Raises MemoryError."""
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.key_dim
        self.block_size = block_size
        self.type: Type = TYPE_OF[dtype]
        half_bytes = num_blocks * block_size * shape.num_kv_heads * shape.key_dim * dtype.itemsize
        self._memory = library.memory(2 * half_bytes)
        self.keys = int(self._memory.ctypes.data)
        self.values = self.keys + half_bytes
