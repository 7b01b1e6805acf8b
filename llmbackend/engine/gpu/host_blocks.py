"""KV blocks in host memory, and copies of whole blocks between it and the device.

For: the runner. Does not know: models, steps, which text a block holds. Invariants: a host block is one contiguous
piece of pinned memory with the block's keys and values of all layers; a copy is ordered with the device's other work as
if it were a part of it. The device's own work only gathers blocks in a buffer, or spreads them from there; between that
and the host they go beside it, neighbours on the host as one copy. Of the two buffers one is filled while the other is
emptied.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from ..config import EngineConfig
from ..step import KVCopies
from .device import Device, Mark
from .ops import LayerCache

CHUNK_BYTES = 1 << 28
"""Pinned memory is allocated in pieces of this size: torch rounds each up to a power of two."""

STAGING_BYTES = 1 << 27
"""Of both buffers together, unless a block is larger than one of them."""


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
        """As many as the config asks for, or None. Raises ValueError when there is no room for one, RuntimeError when
        the host cannot pin so much memory."""
        layers = list(caches)
        num_blocks = config.num_host_blocks(sum(part.shape[1] for part in _parts(layers)))
        return cls(device, layers, num_blocks) if num_blocks else None

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
        """Neighbours among these host blocks, which rise, and the places in the buffer that belong to them."""
        per_chunk = self._blocks_per_chunk
        breaks = [i for i in range(1, len(hosts)) if hosts[i] != hosts[i - 1] + 1 or hosts[i] % per_chunk == 0]
        runs = []
        for start, end in pairwise((0, *breaks, len(hosts))):
            place = hosts[start] % per_chunk
            on_host = self._chunks[hosts[start] // per_chunk][place : place + end - start]
            runs.append((on_host, buffer.memory[start:end]))
        return runs


class _Buffer:
    """Room on the device for some blocks as the host has them. Marks say when its last use is over."""

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
        device.beside.enqueue(lambda: _copy([(host, here) for host, here in runs]))
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
    """Device memory that HostBlocks takes."""
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
    from .kernels.move_blocks import BlockMoves  # Triton, which only a GPU's torch brings

    return BlockMoves(parts, ends, staged)


class _Moves(Protocol):
    """Device work: blocks to the front of a buffer, in this order, and back."""

    def gather(self, blocks: tuple[int, ...]) -> None: ...

    def spread(self, blocks: tuple[int, ...]) -> None: ...


class _TorchMoves:
    """What kernels/move_blocks.py does in one launch."""

    def __init__(self, parts: list[torch.Tensor], ends: list[int], staged: torch.Tensor) -> None:
        self._parts, self._ends, self._staged = parts, ends, staged

    def gather(self, blocks: tuple[int, ...]) -> None:
        for part, (start, end) in zip(self._parts, pairwise(self._ends), strict=True):
            self._staged[: len(blocks), start:end] = part[list(blocks)]

    def spread(self, blocks: tuple[int, ...]) -> None:
        for part, (start, end) in zip(self._parts, pairwise(self._ends), strict=True):
            part[list(blocks)] = self._staged[: len(blocks), start:end]
