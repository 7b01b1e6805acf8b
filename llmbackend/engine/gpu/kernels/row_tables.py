"""What a decode step reads from the rows on the device, and what it leaves there, one launch each.

For: triton_ops.py. Does not know: models, requests, graphs. Invariant: of a sequence that pads the step no table is
read, and nothing is written for it but what says so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops import PADDING_SLOT

_AT_ONCE = 128


def next_inputs(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """As Ops.next_inputs."""
    next_inputs_kernel[(triton.cdiv(len(rows), _AT_ONCE),)](
        rows, seq_lens, token_table, token_table.stride(0), block_table, block_table.stride(0),
        token_ids, positions, slots, len(rows), BLOCK_SIZE=block_size, PADDING=PADDING_SLOT, AT_ONCE=_AT_ONCE,
    )  # fmt: skip


def put_tokens(rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, token_table: torch.Tensor) -> None:
    """As Ops.put_tokens."""
    put_tokens_kernel[(triton.cdiv(len(rows), _AT_ONCE),)](
        rows, positions, token_ids, token_table, token_table.stride(0), len(rows), AT_ONCE=_AT_ONCE
    )


@triton.jit(do_not_specialize=["num_rows"])
def next_inputs_kernel(
    rows, seq_lens, token_table, token_stride, block_table, block_stride, token_ids, positions, slots, num_rows,
    BLOCK_SIZE: tl.constexpr, PADDING: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = place < num_rows
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    last = tl.load(seq_lens + place, mask=inside, other=0) - 1
    live = last >= 0
    position = tl.maximum(last, 0)
    token_id = tl.load(token_table + row * token_stride + position, mask=live, other=0)
    block = tl.load(block_table + row * block_stride + position // BLOCK_SIZE, mask=live, other=0)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, PADDING)
    tl.store(token_ids + place, token_id, mask=inside)
    tl.store(positions + place, position, mask=inside)
    tl.store(slots + place, slot, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def put_tokens_kernel(rows, positions, token_ids, token_table, token_stride, num_rows, AT_ONCE: tl.constexpr):
    place = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = place < num_rows
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + place, mask=inside, other=0)
    token_id = tl.load(token_ids + place, mask=inside, other=0)
    tl.store(token_table + row * token_stride + position, tl.maximum(token_id, 0), mask=inside)
