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
    if group.query_len == 1 or options.softcap is not None or options.sinks is not None:
        attended = grouped_attention(queries, keys, values, group.visible, options)
    else:
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=group.visible[:, None], scale=options.scaling, enable_gqa=True
        )
    return attended.transpose(1, 2).flatten(0, 1)


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
    grouped = (queries.float() * options.scaling).reshape(rows, kv_heads, (heads // kv_heads) * query_len, dim)
    scores = (grouped @ keys.float().transpose(-1, -2)).view(rows, heads, query_len, -1)
    if options.softcap is not None:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    # Filled, not added: a masked score may be infinite.
    scores.masked_fill_(~visible[:, None], float("-inf"))
    weights = _softmax(scores, options.sinks)
    attended = weights.view(rows, kv_heads, -1, weights.shape[-1]) @ values.float()
    return attended.view(rows, heads, query_len, -1).to(queries.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    rows, heads, query_len, _ = scores.shape
    extra = sinks.float().view(1, heads, 1, 1).expand(rows, heads, query_len, 1)
    return torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1].contiguous()
