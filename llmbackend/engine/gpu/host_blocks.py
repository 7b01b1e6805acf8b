"""KV blocks in host memory: copies between them and the device's, as ordered work of the device.

For: the runner. Does not know: which text a block holds, or why it is copied (host_tier.py). Invariants: a host block
is one contiguous piece of pinned memory, with the block's keys and values of all layers behind each other; copies are
enqueued like steps, so that they see what earlier ones wrote and nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch

from ..config import EngineConfig
from ..step import KVCopies
from .device import Device
from .ops import LayerCache

CHUNK_BYTES = 1 << 28
"""Pinned memory is taken in pieces of this size: torch rounds each up to a power of two."""


class HostBlocks:
    def __init__(self, device: Device, caches: Iterable[LayerCache], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._device = device
        self._parts = [_block_bytes(part) for cache in caches for part in (cache.keys, cache.values)]
        self._ends = list(accumulate(part.shape[1] for part in self._parts))
        block_bytes = self._ends[-1]
        self._blocks_per_chunk = max(CHUNK_BYTES // block_bytes, 1)
        counts = [
            min(self._blocks_per_chunk, num_blocks - first) for first in range(0, num_blocks, self._blocks_per_chunk)
        ]
        self._chunks = [device.pinned(count * block_bytes, torch.uint8).view(count, block_bytes) for count in counts]

    @classmethod
    def make(cls, config: EngineConfig, device: Device, caches: Iterable[LayerCache]) -> HostBlocks | None:
        """As many as the config asks for. Raises ValueError when there is no room for one, RuntimeError when the host
        has no such memory."""
        layers = list(caches)
        block_bytes = sum(_block_bytes(part).shape[1] for layer in layers for part in (layer.keys, layer.values))
        num_blocks = config.num_host_blocks(block_bytes)
        return cls(device, layers, num_blocks) if num_blocks else None

    def copy(self, copies: KVCopies) -> None:
        """Enqueues the copies and returns."""
        pairs = list(zip(copies.blocks.tolist(), copies.host_blocks.tolist(), strict=True))
        self._device.enqueue(lambda: self._copy(copies.to_host, pairs))

    def _copy(self, to_host: bool, pairs: list[tuple[int, int]]) -> None:
        """Device work."""
        for block, host_block in pairs:
            host = self._chunks[host_block // self._blocks_per_chunk][host_block % self._blocks_per_chunk]
            for part, end in zip(self._parts, self._ends, strict=True):
                on_device, on_host = part[block], host[end - part.shape[1] : end]
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=True)


def _block_bytes(part: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, uint8 [num_blocks, bytes of a block]."""
    return part.view(torch.uint8).view(part.shape[0], -1)
