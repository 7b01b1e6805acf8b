"""Attention for training on rows of packed samples on CPUs: skips whatever precedes a block's first sample.

Plain products of few shapes; in bfloat16 several times as fast as the CPU's fused kernel with a mask. Independent of
the model and of how rows are packed. Invariant: the result is that of scaled_dot_product_attention with the same mask,
up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface

NAME = "packed_samples"
"""The attn_implementation that this module registers."""
BLOCK = 128
"""Queries computed together; rows are a multiple of it."""


def packed_mask(samples: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """From int64 [rows, tokens] sample numbers, [rows, 1, tokens, tokens] to add: 0 where a token is seen.
    dtype: also of the products."""
    same = samples[:, None, :, None] == samples[:, None, None, :]
    return torch.where(same.tril(), 0.0, -math.inf).to(dtype)


def _blocks(positions: torch.Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Row, queries and keys of each block: the keys begin with the block where the first query's sample begins."""
    for begin in range(0, positions.shape[1], BLOCK):
        for row, position in enumerate(positions[:, begin].tolist()):
            first = (begin - position) // BLOCK * BLOCK
            yield row, slice(begin, begin + BLOCK), slice(first, begin + BLOCK)


@torch.library.custom_op("packed::attend", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output as `query`, [rows, heads, tokens, head_dim], and the shares of the keys, set in the blocks alone."""
    output = torch.empty_like(query)
    shares = query.new_empty(*query.shape[:3], query.shape[2])
    for row, queries, keys in _blocks(positions):
        scores = torch.baddbmm(mask[row, 0, queries, keys], query[row, :, queries], key[row, :, keys].mT)
        share = shares[row, :, queries, keys] = scores.softmax(-1)
        output[row, :, queries] = share @ value[row, :, keys]
    return output, shares


@torch.library.custom_op("packed::attend_backward", mutates_args=())
def attend_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shares: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value from that of the output."""
    to_query, to_key, to_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for row, queries, keys in _blocks(positions):
        above, share = gradient[row, :, queries], shares[row, :, queries, keys]
        to_value[row, :, keys] += share.mT @ above
        to_share = above @ value[row, :, keys].mT
        to_scores = torch.ops.aten._softmax_backward_data(to_share, share, -1, share.dtype)
        to_query[row, :, queries] = to_scores @ key[row, :, keys]
        to_key[row, :, keys] += to_scores.mT @ query[row, :, queries]
    return to_query, to_key, to_value


@attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(*query.shape[:3], query.shape[2])


@attend_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, _, positions = inputs
    ctx.save_for_backward(query, key, value, output[1], positions)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *attend_backward(gradient.contiguous(), *ctx.saved_tensors), None, None


attend.register_autograd(_backward, setup_context=_keep)


def packed_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
    scaling: float, position_ids: torch.Tensor, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention function; `mask` is that of `packed_mask`, positions count within the sample."""
    groups = query.shape[1] // key.shape[1]
    heads = query * scaling, *(part.repeat_interleave(groups, 1) for part in (key, value))
    output, _shares = attend(*(part.to(mask.dtype).contiguous() for part in heads), mask, position_ids)
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, packed_attention)
