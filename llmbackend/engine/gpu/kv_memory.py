"""KV memory: how many blocks a device has room for, and those blocks.

For: the runner, when it is made. Does not know: models, steps, which text a block holds. Invariants: KV blocks leave
room for the largest step and for the graphs, both measured before, and for the buffers of blocks in host memory; an
engine that could not hold one sequence of max_model_len tokens does not start, and says what would help.
Source of the names: vLLM's gpu_memory_utilization, num_gpu_blocks_override, kv_cache_memory_bytes, kv_cache_dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..attention.interface import LayerShape
from ..config import EngineConfig
from ..kv_groups import KVGroups
from .device import Device, Memory
from .host_blocks import staging_bytes
from .ops import LayerCache

_MAX_SLOTS = (1 << 31) - 1
"""Slots are int32."""


def kv_dtype(config: EngineConfig, dtype: torch.dtype, device: Device) -> torch.dtype:
    """The dtype in which keys and values are stored. Raises ValueError naming the engine argument."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if not device.has_float8:
        raise ValueError(
            f"engine argument 'kv_cache_dtype' is '{config.kv_cache_dtype}', which {device.name} cannot compute with"
        )
    return torch.float8_e4m3fn


def block_bytes(shapes: Mapping[nn.Module, LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block, in all layers."""
    return block_size * sum(shape.bytes_per_token(dtype) for shape in shapes.values())


def num_kv_blocks(
    config: EngineConfig,
    max_model_len: int,
    bytes_per_block: int,
    memory: Memory,
    graph_bytes: int,
    groups: KVGroups = KVGroups(),
) -> int:
    """How many KV blocks there is room for. memory: the device's after the largest step has run. groups: of the layers,
    each block being of one of them. Raises ValueError when not one sequence of max_model_len tokens fits."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.num_host_blocks(bytes_per_block):
        graph_bytes += staging_bytes(bytes_per_block)
    available = _available_bytes(config, memory, graph_bytes)
    num_blocks = min(max(available, 0) // bytes_per_block, _MAX_SLOTS // config.block_size)
    needed = groups.most_blocks(max_model_len, config.max_num_batched_tokens, config.block_size)
    if num_blocks >= needed:
        return num_blocks
    source = "gpu_memory_utilization" if config.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"
    raise ValueError(
        f"engine argument 'max_model_len' is {max_model_len}, whose KV blocks take {_gib(needed * bytes_per_block)}, "
        f"and there is room for {_gib(max(available, 0))} (of {_gib(memory.total_bytes)}, {_gib(memory.free_bytes)} "
        f"are free beside the weights and the largest step, and graphs take {_gib(graph_bytes)}): expected at most "
        f"{groups.most_tokens(config.block_size, num_blocks, config.max_num_batched_tokens)}, or a larger {source}"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"


def _available_bytes(config: EngineConfig, memory: Memory, graph_bytes: int) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    kept_free = memory.total_bytes * (1.0 - config.gpu_memory_utilization)
    return int(memory.free_bytes - kept_free) - graph_bytes


def kv_caches(
    shapes: Mapping[nn.Module, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> dict[nn.Module, LayerCache]:
    """Zeros, by attention module. Memory of 8-bit types is allocated as bytes, in all of which 0 is the byte 0.

    Raises torch.OutOfMemoryError.
    """

    def memory(num_kv_heads: int, dim: int) -> torch.Tensor:
        shape = (num_blocks, num_kv_heads, block_size, dim)
        if dtype.itemsize == 1:
            return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        module: LayerCache(memory(shape.num_kv_heads, shape.key_dim), memory(shape.num_kv_heads, shape.value_dim))
        for module, shape in shapes.items()
    }
