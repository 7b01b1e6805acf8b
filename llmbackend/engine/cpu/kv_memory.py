"""KV memory in the layout of the native kernels, and how many blocks of it an engine on CPU has.

For: the native program, and native attention under modules. Does not know: torch, which request owns a block, how
attention is computed. Invariant: a block takes no memory before something is written to it.
"""

from __future__ import annotations

from typing import Final

from ..config import EngineConfig
from ..kernels.abi import Type
from ..kernels.library import KernelLibrary

BLOCK_MULTIPLE: Final = 32
HEAD_MULTIPLE: Final = 32
_DEFAULT_KV_BYTES: Final = 1 << 30
_ITEM_BYTES: Final = {Type.FLOAT32: 4, Type.BFLOAT16: 2}


def can_hold(key_dim: int, value_dim: int, block_size: int) -> bool:
    """Whether heads of these sizes fit the native layout."""
    return key_dim == value_dim and key_dim % HEAD_MULTIPLE == 0 and block_size % BLOCK_MULTIPLE == 0


class NativeLayerCache:
    """One layer's keys and values; `keys` and `values` are addresses (layouts: native/step.h, RotaryOp)."""

    def __init__(
        self, library: KernelLibrary, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, kv_type: Type
    ) -> None:
        """Raises MemoryError."""
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.type = kv_type
        half_bytes = num_blocks * block_size * num_kv_heads * head_dim * _ITEM_BYTES[kv_type]
        self._memory = library.memory(2 * half_bytes)
        self.keys = int(self._memory.ctypes.data)
        self.values = self.keys + half_bytes


def num_kv_blocks(config: EngineConfig, bytes_per_token: int, max_model_len: int) -> int:
    """bytes_per_token: of all layers. Raises ValueError where there is no room for one block."""
    if config.kv_cache_dtype != "auto":
        raise ValueError(
            f"engine argument 'kv_cache_dtype' is '{config.kv_cache_dtype}', expected 'auto': only the accelerator "
            "path keeps keys and values in 8 bits"
        )
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = config.block_size * bytes_per_token
    memory_bytes = config.kv_cache_memory_bytes or _DEFAULT_KV_BYTES
    num_blocks = memory_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"engine argument 'kv_cache_memory_bytes' is {memory_bytes}, "
            f"expected at least {block_bytes}, the size of one block of {config.block_size} tokens"
        )
    # More than all rows at full length need is never used.
    return min(num_blocks, config.max_num_seqs * -(-max_model_len // config.block_size))
