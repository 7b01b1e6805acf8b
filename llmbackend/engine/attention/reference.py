"""Paged attention in plain torch, for CPU and CUDA.

For: every model until a faster backend takes over, and as the truth that other backends are tested against. Does not
know: which model calls it. Invariant: a step's tokens are written to the cache before they are read, so prefill,
chunked prefill and decode are one path; the result of a row is computed with shapes that depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from .interface import AttentionOptions
from .kv_cache import LayerKVCache
from .ragged_batch import RaggedBatch, RowGroup

# Products with fewer rows than this take other paths through the CPU's matrix library, which round differently.
_MIN_ROWS = 8
# 64 MB of float32.
_MAX_SCORES = 1 << 24


class PagedAttention:
    """The context of a step: the runner sets `batch` before each forward pass."""

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
    attended = _dense_attention(queries, keys, values, group.visible, options)
    return attended.transpose(1, 2).flatten(0, 1)


def _dense_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """As grouped_attention, in slices of queries that bound the memory for scores; torch's fused attention on a GPU.

    Not fused on CPU, although that saves a third of the time of a long prefill: the fused kernel's result for a query
    depends on how many others are computed with it, so a prompt's chunks would change its tokens. Plain products do
    not.
    """
    rows, heads, query_len, _ = queries.shape
    if queries.is_cuda and query_len > 1 and options.softcap is None and options.sinks is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible[:, None], scale=options.scaling, enable_gqa=True
        )
    slice_len = max(1, _MAX_SCORES // (rows * heads * keys.shape[2]))
    if slice_len >= query_len:
        return grouped_attention(queries, keys, values, visible, options)
    keys, values = keys.float(), values.float()
    starts = range(0, query_len, slice_len)
    slices = ((queries[:, :, a : a + slice_len], visible[:, a : a + slice_len]) for a in starts)
    return torch.cat([grouped_attention(q, keys, values, seen, options) for q, seen in slices], dim=2)


def grouped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attention with the softmax and the products in float32; all options.

    queries [rows, heads, query_len, dim], keys and values [rows, kv_heads, keys, dim] (heads is a multiple of kv_heads:
    each key head is multiplied with its group of query heads, never copied), visible bool [rows, query_len, keys]
    → [rows, heads, query_len, value_dim] in queries' dtype.
    """
    rows, heads, query_len, dim = queries.shape
    kv_heads = keys.shape[1]
    num_grouped = heads // kv_heads * query_len
    grouped = (queries.float() * options.scaling).reshape(rows, kv_heads, num_grouped, dim)
    scores = _product(grouped, keys.float().transpose(-1, -2)).reshape(rows, heads, query_len, -1)
    if options.softcap is not None:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    # Filled, not added: a masked score may be infinite.
    scores.masked_fill_(~visible[:, None], float("-inf"))
    weights = _softmax(scores, options.sinks)
    attended = _product(weights.view(rows, kv_heads, num_grouped, -1), values.float())
    return attended.reshape(rows, heads, query_len, -1).to(queries.dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, where a row of the result does not depend on how many others there are."""
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
