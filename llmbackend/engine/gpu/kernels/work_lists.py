"""Which part of a step's attention each program computes. A launch has as many programs as the device runs at a time;
they read the step's lengths on the device and share the work evenly.

For: attention.py. Does not know: what is computed. Invariants: decode's list holds each split of each sequence with one
query and for each tile of heads once, prefill's each tile of queries of each other sequence; padding sequences with a
token are on decode's list, so that they get zeros. SEQUENCES is a power of two that no step exceeds.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_split(length, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """The first split that the last query of a sequence of this length sees."""
    if HAS_WINDOW:
        return tl.maximum(length - window, 0) // SPLIT
    return length * 0


@triton.jit
def decode_splits(
    query_start, seq_lens, num_sequences, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, SEQUENCES: tl.constexpr
):
    """[SEQUENCES]: how many splits the query of each sequence sees, at least one; 0 where there is not one query."""
    sequence = tl.arange(0, SEQUENCES)
    there = sequence < num_sequences
    begin = tl.load(query_start + sequence, mask=there, other=0)
    queries = tl.load(query_start + sequence + 1, mask=there, other=0) - begin
    length = tl.load(seq_lens + sequence, mask=there, other=0)
    splits = tl.cdiv(length, SPLIT) - first_split(length, window, HAS_WINDOW, SPLIT)
    return tl.where(queries == 1, tl.maximum(splits, 1), 0)


@triton.jit
def stored_before(splits, sequence):
    """How many places in the workspace the splits of the sequences before this one take: a single split takes none."""
    return tl.sum(tl.where((tl.arange(0, splits.shape[0]) < sequence) & (splits > 1), splits, 0), 0)


@triton.jit
def decode_ends(splits, capacity):
    """[SEQUENCES]: where each sequence's items end on the list of one tile of heads. A sequence whose splits find no
    place in the workspace is one item."""
    stored = tl.cumsum(tl.where(splits > 1, splits, 0), 0)
    return tl.cumsum(tl.where(stored > capacity, tl.minimum(splits, 1), splits), 0)


@triton.jit
def prefill_ends(query_start, num_sequences, QUERIES: tl.constexpr, SEQUENCES: tl.constexpr):
    """[SEQUENCES]: where each sequence's tiles of queries end."""
    sequence = tl.arange(0, SEQUENCES)
    there = sequence < num_sequences
    begin = tl.load(query_start + sequence, mask=there, other=0)
    queries = tl.load(query_start + sequence + 1, mask=there, other=0) - begin
    return tl.cumsum(tl.where(queries > 1, tl.cdiv(queries, QUERIES), 0), 0)


@triton.jit
def owner_of(ends, item):
    """The sequence of an item, and how many items come before the sequence's."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def own_share(count):
    """The items of this program: as many as any other has, or one less; neighbours, which share keys and queries."""
    count, programs = count.to(tl.int64), tl.num_programs(0)
    begin = count * tl.program_id(0) // programs
    end = count * (tl.program_id(0) + 1) // programs
    return begin.to(tl.int32), end.to(tl.int32)
