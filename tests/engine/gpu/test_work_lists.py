# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Programs of an attention launch share its work evenly, and do each part of it once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from llmbackend.engine.gpu.kernels.attention import decode_ends, decode_splits, own_share, owner_of, prefill_ends
from tests.helpers.gpu.kernel_device import DEVICE

SPLIT, HEAD_TILES, QUERIES = 256, 8, 32
SEQUENCES = 16


@triton.jit
def list_decode(
    query_start, seq_lens, num_sequences, window, capacity, owners, programs,
    heads: tl.constexpr, has_window: tl.constexpr, split: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    splits = decode_splits(query_start, seq_lens, num_sequences, window, has_window, split, most)
    ends = decode_ends(splits, capacity) * heads
    begin, end = own_share(tl.max(ends, 0))
    for item in range(begin, end):
        sequence, _ = owner_of(ends, item)
        tl.store(owners + item, sequence)
        tl.atomic_add(programs + tl.program_id(0), 1)


@triton.jit
def list_prefill(query_start, num_sequences, owners, queries: tl.constexpr, most: tl.constexpr):
    ends = prefill_ends(query_start, num_sequences, queries, most)
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        sequence, _ = owner_of(ends, item)
        tl.store(owners + item, sequence)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def decode_items(capacity: int = 1000, window: int = 0) -> tuple[list[int], list[int]]:
    """Items of each sequence of a mixed step (one long row, some short ones, a prompt, padding with and without a
    token), and of each of 12 programs."""
    owners, programs = ints(*[-1] * 1000), ints(*[0] * 12)
    step: tuple[Any, ...] = ints(0, 1, 2, 3, 43, 44, 45, 45), ints(8000, 300, 256, 90, 1, 0, 0), 7
    constants = {"heads": HEAD_TILES, "has_window": window > 0, "split": SPLIT, "most": SEQUENCES}
    list_decode[(12,)](*step, window, capacity, owners, programs, **constants)
    return [int((owners == sequence).sum()) for sequence in range(7)], programs.tolist()


def test_a_long_row_is_shared_by_all_programs() -> None:
    sequences, programs = decode_items()
    assert sequences == [32 * 8, 2 * 8, 8, 0, 8, 8, 0]
    assert max(programs) - min(programs) <= 1
    assert sum(programs) == sum(sequences)


def test_a_window_and_a_full_workspace_leave_fewer_items() -> None:
    assert decode_items(window=600)[0] == [4 * 8, 2 * 8, 8, 0, 8, 8, 0]
    assert decode_items(capacity=3)[0] == [8, 8, 8, 0, 8, 8, 0]


def test_tiles_of_queries_are_those_of_prompts() -> None:
    owners = ints(*[-1] * 20)
    list_prefill[(3,)](ints(0, 1, 41, 42, 44, 44), 5, owners, queries=QUERIES, most=SEQUENCES)
    assert owners.tolist() == [1, 1, 3] + [-1] * 17
