"""KV memory of a device: how many blocks fit, those blocks, and blocks in host memory.

Used by the runner when it is created. Invariants: KV blocks leave room for the largest step and the graphs, both
measured before, and for the staging buffers of host blocks. An engine whose memory cannot hold one sequence of
max_model_len tokens does not start, unless max_model_len is AUTO_CONTEXT; the error says which argument to change. A
host block is one contiguous piece of pinned memory with the block's keys and values of all layers; a copy is ordered
with the device's other work.
Device kernels only gather blocks into a staging buffer or scatter them from it; transfers between buffer and host run
concurrently, with neighbouring host blocks as one copy, and one buffer being filled while the other is drained.

Source of the names: vLLM's gpu_memory_utilization, num_gpu_blocks_override, kv_cache_memory_bytes, kv_cache_dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import nn

from ..attention.interface import LayerShape
from ..config import AUTO_CONTEXT, EngineConfig
from ..kv_groups import KVGroups
from ..step import KVCopies
from .device import Device, Mark, Memory
from .ops.ops import LayerCache

CHUNK_BYTES = 1 << 28
"""Pinned memory is allocated in pieces of this size, because torch rounds each up to a power of two."""

STAGING_BYTES = 1 << 27
"""Size of both staging buffers together, unless a block is larger than one of them."""


MAX_FREE_SHARE = 0.95
"""Share of the free memory that KV blocks may take."""


class HostBlocks:
    def __init__(self, device: Device, caches: Iterable[LayerCache], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._device = device
        parts = _parts(caches)
        self._block_bytes = sum(part.shape[1] for part in parts)
        self._blocks_per_chunk = max(CHUNK_BYTES // self._block_bytes, 1)
        counts = [
            min(self._blocks_per_chunk, num_blocks - first) for first in range(0, num_blocks, self._blocks_per_chunk)
        ]
        self._chunks = [
            device.pinned(count * self._block_bytes, torch.uint8).view(count, self._block_bytes) for count in counts
        ]
        room = staging_bytes(self._block_bytes) // self._block_bytes // 2
        self._buffers = [_Buffer(device, parts, room) for _ in range(2)]
        self._num_pieces = 0

    @classmethod
    def make(cls, config: EngineConfig, device: Device, caches: Iterable[LayerCache]) -> HostBlocks | None:
        """As many blocks as the config requests; None = it requests none. Raises ValueError if not even one fits,
        RuntimeError if the host cannot pin that much memory."""
        layers = list(caches)
        num_blocks = config.num_host_blocks(sum(part.shape[1] for part in _parts(layers)))
        return cls(device, layers, num_blocks) if num_blocks else None

    def warm_up(self) -> None:
        """Copies one block to the host and back, which compiles the kernels that move blocks."""
        first = np.zeros(1, np.int32)
        for to_host in (True, False):
            self.copy(KVCopies(to_host, first, first))

    def copy(self, copies: KVCopies) -> None:
        """Enqueues the copies and returns."""
        pairs = sorted(zip(copies.host_blocks.tolist(), copies.blocks.tolist(), strict=True))
        room = self._buffers[0].num_blocks
        for first in range(0, len(pairs), room):
            buffer = self._buffers[self._num_pieces % 2]
            self._num_pieces += 1
            hosts, blocks = zip(*pairs[first : first + room], strict=True)
            runs = self._runs(hosts, buffer)
            if copies.to_host:
                buffer.to_host(blocks, runs)
            else:
                buffer.from_host(blocks, runs)

    def _runs(self, hosts: tuple[int, ...], buffer: _Buffer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Runs of consecutive numbers among these ascending host blocks, each with its slots in the buffer."""
        per_chunk = self._blocks_per_chunk
        breaks = [i for i in range(1, len(hosts)) if hosts[i] != hosts[i - 1] + 1 or hosts[i] % per_chunk == 0]
        runs = []
        for start, end in pairwise((0, *breaks, len(hosts))):
            place = hosts[start] % per_chunk
            on_host = self._chunks[hosts[start] // per_chunk][place : place + end - start]
            runs.append((on_host, buffer.memory[start:end]))
        return runs


class _Buffer:
    """Device memory for some blocks in the host's layout. Marks say when its last use is complete."""

    def __init__(self, device: Device, parts: list[torch.Tensor], num_blocks: int) -> None:
        ends = list(accumulate((part.shape[1] for part in parts), initial=0))
        self.num_blocks = num_blocks
        self.memory = torch.empty((num_blocks, ends[-1]), dtype=torch.uint8, device=device.torch_device)
        self._device = device
        self._moves = _moves(parts, ends, self.memory)
        self._used: Mark = device.mark()
        self._copied: Mark = device.beside.mark()

    def to_host(self, blocks: tuple[int, ...], runs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        device = self._device
        device.follow(self._copied)
        device.enqueue(lambda: self._moves.gather(blocks))
        device.beside.follow(device.mark())
        device.beside.enqueue(lambda: _copy(runs))
        self._copied = device.beside.mark()

    def from_host(self, blocks: tuple[int, ...], runs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        device = self._device
        device.beside.follow(self._used)
        device.beside.enqueue(lambda: _copy([(here, host) for host, here in runs]))
        self._copied = device.beside.mark()
        device.follow(self._copied)
        device.enqueue(lambda: self._moves.spread(blocks))
        self._used = device.mark()


def staging_bytes(block_bytes: int) -> int:
    """Device memory of the staging buffers of HostBlocks."""
    return 2 * max(STAGING_BYTES // 2 // block_bytes, 1) * block_bytes


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def _parts(caches: Iterable[LayerCache]) -> list[torch.Tensor]:
    return [_block_bytes(part) for cache in caches for part in (cache.keys, cache.values)]


def _block_bytes(part: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, uint8 [num_blocks, bytes of a block]."""
    return part.view(torch.uint8).view(part.shape[0], -1)


def _moves(parts: list[torch.Tensor], ends: list[int], staged: torch.Tensor) -> _Moves:
    if not staged.is_cuda:
        return _TorchMoves(parts, ends, staged)
    from .kernels.fused import BlockMoves  # imports Triton, which only GPU builds of torch include

    return BlockMoves(parts, ends, staged)


class _Moves(Protocol):
    """Device work: copies blocks to the start of a buffer, in this order, and back."""

    def gather(self, blocks: tuple[int, ...]) -> None: ...

    def spread(self, blocks: tuple[int, ...]) -> None: ...


class _TorchMoves:
    """The moves of kernels/fused.py (BlockMoves), without Triton."""

    def __init__(self, parts: list[torch.Tensor], ends: list[int], staged: torch.Tensor) -> None:
        self._parts, self._ends, self._staged = parts, ends, staged

    def gather(self, blocks: tuple[int, ...]) -> None:
        for part, (start, end) in zip(self._parts, pairwise(self._ends), strict=True):
            self._staged[: len(blocks), start:end] = part[list(blocks)]

    def spread(self, blocks: tuple[int, ...]) -> None:
        for part, (start, end) in zip(self._parts, pairwise(self._ends), strict=True):
            part[list(blocks)] = self._staged[: len(blocks), start:end]


_MAX_SLOTS = (1 << 31) - 1
"""Slots are int32."""


def kv_dtype(config: EngineConfig, dtype: torch.dtype, device: Device) -> torch.dtype:
    """The dtype in which keys and values are stored. Raises ValueError naming the engine argument."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if not device.has_float8:
        raise ValueError(
            f"engine argument 'kv_cache_dtype' is '{config.kv_cache_dtype}', which {device.name} does not support"
        )
    return torch.float8_e4m3fn


def block_bytes(shapes: Mapping[nn.Module, LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block in all layers."""
    return block_size * sum(shape.bytes_per_token(dtype) for shape in shapes.values())


def num_kv_blocks(
    config: EngineConfig,
    max_model_len: int,
    bytes_per_block: int,
    memory: Memory,
    graph_bytes: int,
    groups: KVGroups = KVGroups(),
) -> int:
    """How many KV blocks fit. memory: the device's, after the largest step has run. groups: of layers; each block
    belongs to one of them. Raises ValueError when a sequence of max_model_len tokens does not fit, or for AUTO_CONTEXT
    when nothing does."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.num_host_blocks(bytes_per_block):
        graph_bytes += staging_bytes(bytes_per_block)
    available = _available_bytes(config, memory, graph_bytes)
    num_blocks = min(max(available, 0) // bytes_per_block, _MAX_SLOTS // config.block_size)
    needed = groups.max_blocks(max_model_len, config.max_num_batched_tokens, config.block_size)
    if num_blocks >= (groups.count if config.max_model_len == AUTO_CONTEXT else needed):
        return num_blocks
    raise ValueError(
        f"engine argument 'max_model_len' is {max_model_len}, whose KV blocks take {_gib(needed * bytes_per_block)}, "
        f"but only {_gib(max(available, 0))} are available (of {_gib(memory.total_bytes)}, weights and the largest "
        f"step take {_gib(memory.own_bytes)}, {_gib(memory.free_bytes)} are free, and graphs take "
        f"{_gib(graph_bytes)}): expected at most "
        f"{groups.max_request_tokens(config.block_size, num_blocks, config.max_num_batched_tokens)}, "
        f"or {_more_memory(config, memory)}"
    )


def _more_memory(config: EngineConfig, memory: Memory) -> str:
    if config.kv_cache_memory_bytes is not None:
        return "a larger kv_cache_memory_bytes"
    if _left_bytes(config, memory) <= _usable_bytes(memory):
        return "a larger gpu_memory_utilization"
    return "less memory used by other processes"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"


def _available_bytes(config: EngineConfig, memory: Memory, graph_bytes: int) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    return min(_left_bytes(config, memory), _usable_bytes(memory)) - graph_bytes


def _left_bytes(config: EngineConfig, memory: Memory) -> int:
    """What this process may still allocate under gpu_memory_utilization, which ignores memory of other processes."""
    return int(memory.total_bytes * config.gpu_memory_utilization) - memory.own_bytes


def _usable_bytes(memory: Memory) -> int:
    """The rest is for what this process and others allocate from now on: not all of it was measured."""
    return int(memory.free_bytes * MAX_FREE_SHARE)


def kv_caches(
    shapes: Mapping[nn.Module, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> dict[nn.Module, LayerCache]:
    """Zeros, by attention module. 8-bit types are allocated as bytes: the byte 0 is 0 in all of them.

    Raises torch.OutOfMemoryError."""

    def memory(num_kv_heads: int, dim: int) -> torch.Tensor:
        shape = (num_blocks, num_kv_heads, block_size, dim)
        if dtype.itemsize == 1:
            return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        module: LayerCache(memory(shape.num_kv_heads, shape.key_dim), memory(shape.num_kv_heads, shape.value_dim))
        for module, shape in shapes.items()
    }
