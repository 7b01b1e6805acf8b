# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Programs of an attention launch share its work evenly, and do each part of it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmbackend.engine.gpu.kernels.attention import (
    decode_ends,
    decode_splits,
    own_item,
    own_share,
    owner_of,
    prefill_ends,
)
from tests.helpers.gpu.kernel_device import DEVICE

SPLIT, HEAD_TILES, QUERIES = 256, 8, 32
SEQUENCES = 16


@triton.jit
def list_decode(
    query_start, seq_lens, num_sequences, window, capacity, owners, work,
    heads: tl.constexpr, has_window: tl.constexpr, split: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    splits = decode_splits(query_start, seq_lens, num_sequences, window, has_window, split, most)
    ends, num_splits = decode_ends(splits, capacity)
    ends, num_splits = ends * heads, num_splits * heads
    begin, end, stop = own_share(num_splits, tl.max(ends, 0))
    for i in range(begin, stop):
        item = own_item(i, end, num_splits)
        sequence, _ = owner_of(ends, item)
        of_sequence = tl.sum(tl.where(tl.arange(0, most) == sequence, splits, 0), 0)
        tl.atomic_add(owners + item * most + sequence, 1)
        tl.atomic_add(work + tl.program_id(0), tl.where(item < num_splits, 1, of_sequence))


@triton.jit
def list_prefill(query_start, num_sequences, owners, queries: tl.constexpr, most: tl.constexpr):
    ends = prefill_ends(query_start, num_sequences, queries, most)
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        sequence, _ = owner_of(ends, item)
        tl.store(owners + item, sequence)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def decode_items(capacity: int = 1000, window: int = 0, *step: torch.Tensor) -> tuple[list[int], list[int]]:
    """Items of each sequence of a step, and splits that each of 12 programs computes. By default a mixed step: one long
    row, some short ones, a prompt, padding with and without a token."""
    query_start, seq_lens = step or (ints(0, 1, 2, 3, 43, 44, 45, 45), ints(8000, 300, 256, 90, 1, 0, 0))
    owners, work = ints(*[0] * 3000 * SEQUENCES).view(-1, SEQUENCES), ints(*[0] * 12)
    constants = {"heads": HEAD_TILES, "has_window": window > 0, "split": SPLIT, "most": SEQUENCES}
    list_decode[(12,)](query_start, seq_lens, len(seq_lens), window, capacity, owners, work, **constants)
    per_sequence = owners.sum(0).tolist()
    num_items = sum(per_sequence)
    assert owners.sum(1).tolist() == [1] * num_items + [0] * (len(owners) - num_items), "an item is computed once"
    return per_sequence[: len(seq_lens)], work.tolist()


def test_a_long_row_is_shared_by_all_programs() -> None:
    sequences, work = decode_items()
    assert sequences == [32 * 8, 2 * 8, 8, 0, 8, 8, 0]
    assert max(work) - min(work) <= 1
    assert sum(work) == sum(sequences)


def test_a_window_and_a_full_workspace_leave_fewer_items() -> None:
    assert decode_items(window=600)[0] == [4 * 8, 2 * 8, 8, 0, 8, 8, 0]
    assert decode_items(capacity=3)[0] == [8, 8, 8, 0, 8, 8, 0]


def test_sequences_that_do_not_fit_in_the_workspace_are_shared_evenly() -> None:
    """Each is an item of all its splits, behind the others in the list."""
    step = ints(*range(9)), ints(*[40 * SPLIT] * 8)
    sequences, work = decode_items(240, 0, *step)
    assert sequences == [40 * 8] * 6 + [8] * 2
    assert sum(work) == 8 * 40 * 8
    assert max(work) <= sum(work) / len(work) + 40


def test_tiles_of_queries_are_those_of_prompts() -> None:
    owners = ints(*[-1] * 20)
    list_prefill[(3,)](ints(0, 1, 41, 42, 44, 44), 5, owners, queries=QUERIES, most=SEQUENCES)
    assert owners.tolist() == [1, 1, 3] + [-1] * 17
