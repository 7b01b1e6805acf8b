"""Rows of the embedding table into the residual stream.

For: triton_ops.py. Does not know: models, streams. Invariant: a token id outside the table (a padding token's may be
anything) reads nothing and gives zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_TILE = 4096


def embed(token_ids: torch.Tensor, embedding: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
    """residual[t] = embedding[token_ids[t]] * factor: token_ids int [T], embedding [vocab, width] in any float type,
    residual float32 [T, width]; rows contiguous."""
    num_tokens, width = residual.shape
    tile = min(triton.next_power_of_2(width), _MAX_TILE)
    embed_kernel[(num_tokens, triton.cdiv(width, tile))](
        token_ids, embedding, residual, factor, embedding.shape[0], width,
        embedding.stride(0), residual.stride(0), TILE=tile,
    )  # fmt: skip


@triton.jit
def embed_kernel(
    token_ids, embedding, residual, factor, vocab_size, width, embedding_stride, residual_stride, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    token_id = tl.load(token_ids + token).to(tl.int64)
    known = (token_id >= 0) & (token_id < vocab_size)
    row = tl.load(embedding + token_id * embedding_stride + columns, mask=inside & known, other=0.0)
    tl.store(residual + token * residual_stride + columns, row.to(tl.float32) * factor, mask=inside)
