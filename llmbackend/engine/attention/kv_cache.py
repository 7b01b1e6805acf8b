"""Paged memory for keys and values: one pair of tensors per attention layer, shared block ids.

For: attention backends and the model runner, which sizes it. Does not know: which request owns a block. Invariant: what
is stored is finite, so that a broken request's leftovers in a reused block cannot turn into NaN in another's output
(zero weight times NaN is NaN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV shape of one attention layer; layers of one model may differ."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class LayerKVCache:
    """keys [num_blocks, num_kv_heads, block_size, key_dim], values likewise: a head's part of a block is contiguous, so
    that gathering a row's keys per head is a copy of whole slabs."""

    def __init__(
        self, shape: LayerShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        leading = (num_blocks, shape.num_kv_heads, block_size)
        self.keys = _zeros((*leading, shape.key_dim), dtype, device)
        self.values = _zeros((*leading, shape.value_dim), dtype, device)

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [tokens, num_kv_heads, dim] go to slots int64 [tokens] (block * block_size + offset)."""
        block_size = self.keys.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        self.keys[blocks, :, offsets] = torch.nan_to_num(key)
        self.values[blocks, :, offsets] = torch.nan_to_num(value)

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """blocks int64 [rows, n] → keys [rows, num_kv_heads, n * block_size, key_dim] and values, contiguous."""
        return _gather(self.keys, blocks), _gather(self.values, blocks)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost no memory on CPU before they are written: numpy asks the system for zero pages, torch fills."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, np.uint8)).view(dtype).view(shape)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    num_blocks, heads, block_size, dim = cache.shape
    rows, count = blocks.shape
    slabs = blocks[:, None, :] * heads + torch.arange(heads, device=blocks.device)[None, :, None]
    # index_select on flat slabs is several times faster on CPU than indexing the four-dimensional tensor.
    gathered = cache.view(num_blocks * heads, block_size * dim).index_select(0, slabs.reshape(-1))
    return gathered.view(rows, heads, count * block_size, dim)
