"""Paged attention in plain torch, for CPU and CUDA: its KV memory, the ragged layout of a step, and the computation.

Used for models that run as transformers modules if no faster backend fits, and as the reference in tests of other
backends. Invariants: the tokens of a step are written to the cache before they are read, so prefill, chunked prefill
and decode are one path; a row is computed with shapes that depend only on that row; stored keys and values are finite,
because zero times a leftover NaN is NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from .interface import AttentionOptions, LayerShape

# Products with fewer rows than this take other paths through the CPU's matrix library, which round differently.
_MIN_ROWS = 8
# 64 MB of float32.
_MAX_SCORES = 1 << 24


class PagedAttention:
    """The context of one step."""

    def __init__(self, caches: Mapping[nn.Module, LayerKVCache], batch: RaggedBatch) -> None:
        self._caches = caches
        self._batch = batch

    def attend(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        cache = self._caches[layer]
        cache.write(self._batch.slots, key, value)
        output = query.new_empty((query.shape[0], query.shape[1], value.shape[-1]))
        for group in self._batch.groups(options.sliding_window):
            tokens = slice(group.first_token, group.end_token)
            output[tokens] = _attend_group(query[tokens], cache, group, options)
        return output


def _attend_group(query: torch.Tensor, cache: LayerKVCache, group: RowGroup, options: AttentionOptions) -> torch.Tensor:
    keys, values = cache.gather(group.blocks)
    # [tokens, heads, dim] → [rows, heads, query_len, dim]
    queries = query.reshape(group.num_rows, group.query_len, *query.shape[1:]).transpose(1, 2)
    distance = None if options.slopes is None else group.distance
    attended = _dense_attention(queries, keys, values, group.visible, options, distance)
    return attended.transpose(1, 2).flatten(0, 1)


def _dense_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, options: AttentionOptions,
    distance: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """As grouped_attention, in slices of queries that bound the memory for scores; on a GPU torch's fused attention.

    Not fused on CPU, although that would save a third of the time of a long prefill: the result of the fused kernel for
    a query depends on how many others are computed with it, so the chunking of a prompt would change its tokens. Plain
    products have no such dependence.
    """
    rows, heads, query_len, _ = queries.shape
    is_plain = options.softcap is None and options.sinks is None and options.slopes is None
    if queries.is_cuda and query_len > 1 and is_plain:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible[:, None], scale=options.scaling, enable_gqa=True
        )
    slice_len = max(1, _MAX_SCORES // (rows * heads * keys.shape[2]))
    if slice_len >= query_len:
        return grouped_attention(queries, keys, values, visible, options, distance)
    keys, values = keys.float(), values.float()
    parts = [slice(start, start + slice_len) for start in range(0, query_len, slice_len)]
    slices = ((queries[:, :, a], visible[:, a], None if distance is None else distance[:, a]) for a in parts)
    return torch.cat([grouped_attention(q, keys, values, seen, options, far) for q, seen, far in slices], dim=2)


def grouped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, options: AttentionOptions,
    distance: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention with the softmax and the products in float32; all options.

    queries [rows, heads, query_len, dim], keys and values [rows, kv_heads, keys, dim] (heads is a multiple of kv_heads:
    each key head is multiplied with its group of query heads, never copied), visible bool [rows, query_len, keys],
    distance float32 [rows, query_len, keys] of a key's position from its query's, where there are slopes
    → [rows, heads, query_len, value_dim] in queries' dtype.
    """
    rows, heads, query_len, dim = queries.shape
    kv_heads = keys.shape[1]
    num_grouped = heads // kv_heads * query_len
    grouped = (queries.float() * options.scaling).reshape(rows, kv_heads, num_grouped, dim)
    scores = _product(grouped, keys.float().transpose(-1, -2)).reshape(rows, heads, query_len, -1)
    if options.slopes is not None:
        assert distance is not None, "biases by distance need the distances"
        scores.addcmul_(options.slopes.to(scores).view(1, heads, 1, 1), distance[:, None])
    if options.softcap is not None:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    # Filled, not added: a masked score may be infinite.
    scores.masked_fill_(~visible[:, None], float("-inf"))
    weights = _softmax(scores, options.sinks)
    attended = _product(weights.view(rows, kv_heads, num_grouped, -1), values.float())
    return attended.reshape(rows, heads, query_len, -1).to(queries.dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, such that a row of the result does not depend on the number of rows."""
    count = left.shape[2]
    if count >= _MIN_ROWS or left.is_cuda:
        return left @ right
    return (functional.pad(left, (0, 0, 0, _MIN_ROWS - count)) @ right)[:, :, :count]


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    rows, heads, query_len, _ = scores.shape
    extra = sinks.float().view(1, heads, 1, 1).expand(rows, heads, query_len, 1)
    return torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1].contiguous()


Int64Array = npt.NDArray[np.int64]

# Products over fewer keys than this take other paths through the CPU's matrix library, which round differently.
_MIN_KEYS = 32


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Neighbouring rows of equal query length, their keys padded to the same number of blocks."""

    first_token: int
    """The group's tokens are first_token … first_token + num_rows * query_len - 1."""
    num_rows: int
    query_len: int
    """In tokens."""
    blocks: torch.Tensor
    """int64 [num_rows, padded_blocks]: KV block ids."""
    visible: torch.Tensor
    """bool [num_rows, query_len, padded_blocks * block_size]: whether a query attends to a key."""
    first_queries: torch.Tensor
    """int64 [num_rows]: position of each row's first query."""
    first_keys: torch.Tensor
    """int64 [num_rows]: position of each row's first key."""

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_rows * self.query_len

    @property
    def distance(self) -> torch.Tensor:
        """float32, as visible: of a key's position from its query's."""
        _, num_queries, num_keys = self.visible.shape
        queries, keys = (torch.arange(n, device=self.visible.device) for n in (num_queries, num_keys))
        return ((self.first_keys - self.first_queries)[:, None, None] + keys - queries[:, None]).float()


def padded_blocks(num_blocks: Int64Array) -> Int64Array:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: few distinct lengths, at most a third of the work is padding."""
    power = 2 ** np.floor(np.log2(np.maximum(num_blocks, 1))).astype(np.int64)
    half_step = power + np.maximum(power // 2, 1)
    rounded = np.where(num_blocks <= power, power, np.where(num_blocks <= half_step, half_step, 2 * power))
    return rounded.astype(np.int64)


class RaggedBatch:
    """Where each row is in the flattened batch, and which KV blocks it reads.

    The padding of a row depends on its own query length, context length and window, never on its neighbours, so its
    result does not depend on them either.
    """

    def __init__(
        self,
        query_lens: Int64Array,
        seq_lens: Int64Array,
        block_table: npt.NDArray[np.int32],
        slots: Int64Array,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Rows are in the order of their tokens; rows of equal query length are neighbours, sorted by context length.

        query_lens, seq_lens: int64 [rows]; a row's queries are the last query_len of its seq_len positions.
        block_table: [rows, max_blocks_per_seq]. slots: int64 [tokens], where each token's key and value are written.
        """
        self._query_lens = query_lens
        self._seq_lens = seq_lens
        self._block_table = block_table
        self._block_size = block_size
        self._device = device
        self._groups: dict[int | None, list[RowGroup]] = {}
        self.slots = torch.from_numpy(slots).to(device)

    def groups(self, sliding_window: int | None) -> list[RowGroup]:
        """The rows as groups for layers with this window; computed once per step and window."""
        found = self._groups.get(sliding_window)
        if found is None:
            found = self._groups[sliding_window] = self._build_groups(sliding_window)
        return found

    def _build_groups(self, window: int | None) -> list[RowGroup]:
        padded, first_block = self._key_ranges(window)
        changes = (np.diff(self._query_lens) != 0) | (np.diff(padded) != 0)
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(padded)]
        token_starts = np.concatenate(([0], np.cumsum(self._query_lens)))
        return [
            self._group(slice(a, b), int(token_starts[a]), int(padded[a]), first_block[a:b], window)
            for a, b in itertools.pairwise(bounds)
        ]

    def _key_ranges(self, window: int | None) -> tuple[Int64Array, Int64Array]:
        """Per row: how many blocks of keys are read, and the first of them."""
        total = padded_blocks(-(-np.maximum(self._seq_lens, _MIN_KEYS) // self._block_size))
        if window is None:
            return total, np.zeros_like(total)
        # The oldest visible key may be anywhere in its block, hence the second extra block.
        limit = (window + self._query_lens - 2) // self._block_size + 2
        first_key = np.maximum(self._seq_lens - self._query_lens - window + 1, 0)
        return np.minimum(total, limit), first_key // self._block_size

    def _group(self, rows: slice, first_token: int, padded: int, first: Int64Array, window: int | None) -> RowGroup:
        query_len, block_size = int(self._query_lens[rows.start]), self._block_size
        columns = first[:, None] + np.arange(padded)
        table = self._block_table[rows]
        blocks = np.take_along_axis(table, np.minimum(columns, table.shape[1] - 1), axis=1).astype(np.int64)
        key_positions = (first * block_size)[:, None] + np.arange(padded * block_size)
        query_positions = (self._seq_lens[rows] - query_len)[:, None] + np.arange(query_len)
        distance = query_positions[:, :, None] - key_positions[:, None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        return RowGroup(
            first_token=first_token,
            num_rows=len(first),
            query_len=query_len,
            blocks=torch.from_numpy(blocks).to(self._device),
            visible=torch.from_numpy(visible).to(self._device),
            first_queries=torch.from_numpy(query_positions[:, 0]).to(self._device),
            first_keys=torch.from_numpy(first * block_size).to(self._device),
        )


class LayerKVCache:
    """keys [num_blocks, num_kv_heads, block_size, key_dim], values likewise: a head's part of a block is contiguous, so
    gathering a row's keys per head copies whole slabs."""

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
    """Zeros whose pages are committed only when written on CPU: numpy requests zero pages from the system, torch would
    write them."""
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
