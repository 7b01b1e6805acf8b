"""Which tokens the next step computes.

For: the engine core. One idea: a request has num_tokens and chases it with num_computed_tokens. Prefill, chunked
prefill, decode and recompute after a preemption are that one chase, under one token budget per step: running requests
first, then waiting ones, both in the order of (priority, arrival). What the prefix cache has of a waiting request
counts as computed when it is admitted. Does not know: logits, finish rules, processes.

Invariants: a step's tokens have their blocks reserved before it runs, and no others; only running sequences hold
blocks; a step that had to preempt admits nobody, and the first running sequence is never preempted, so some request
always comes nearer to its end. Owner of the waiting and running lists, and of num_computed_tokens going back to 0.

While steps are in flight, their tokens count as known and computed. A request whose last token is among them is not
scheduled again; and nobody is preempted or refused for want of blocks until all of them are read, because the requests
that they end give blocks back. So only running rows, and never waiting ones, have tokens that nobody has read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from .kv_cache import KVCacheManager
from .prefix_cache import Key, Prefix
from .sequence import Rows, Sequence
from .step import Int32Array, StepPlan


@dataclass(frozen=True, slots=True)
class Schedule:
    """`plan` is None when nothing can run. `refused` are requests that ended here, with the text for their client."""

    plan: StepPlan | None
    refused: list[tuple[Sequence, str]]


class Scheduler:
    def __init__(self, rows: Rows, kv_cache: KVCacheManager, max_num_batched_tokens: int) -> None:
        self._rows = rows
        self._table = rows.table
        self._kv_cache = kv_cache
        self._budget = max_num_batched_tokens
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._running_rows: Int32Array | None = None
        self._refused: list[tuple[Sequence, str]] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        """Tokens of requests when they were first admitted, and how many of them the prefix cache had."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is over, in whatever state it was: its blocks and its row are free at once, even while a step
        that computes them is in flight (kv_cache.py says why)."""
        if not self._discard(self._running, sequence):
            self._discard(self._waiting, sequence)
        if sequence.row >= 0:
            self._kv_cache.release(sequence.row)
            self._rows.release(sequence)

    def computed(self, rows: Int32Array, num_tokens: Int32Array) -> None:
        """A step of these rows is committed, and sound: what they computed, up to their first `num_tokens[i]` tokens,
        may serve others."""
        self._kv_cache.register(rows, num_tokens)

    def distrust(self, sequence: Sequence) -> None:
        """The sequence failed: nothing that it computed or found in the prefix cache serves anybody after it."""
        if sequence.row >= 0:
            self._kv_cache.distrust(sequence.row)

    def schedule(self, in_flight: bool = False) -> Schedule:
        """Plans one step and reserves its blocks. in_flight: steps are launched that nobody has read."""
        self._refused = []
        continued = self._continue_running(in_flight)
        if continued is None:
            return Schedule(None, [])
        rows, chunks, preempted = continued
        if self._waiting and not preempted:
            new_rows, new_chunks = self._admit_waiting(self._budget - int(chunks.sum()))
            rows = np.concatenate([rows, new_rows])
            chunks = np.concatenate([chunks, new_chunks])
        return Schedule(self._plan(rows, chunks) if len(rows) else None, self._refused)

    def _plan(self, rows: Int32Array, chunks: Int32Array) -> StepPlan:
        table = self._table
        return StepPlan(rows, chunks, table.num_computed_tokens[rows] + chunks == table.num_tokens[rows])

    def _continue_running(self, in_flight: bool) -> tuple[Int32Array, Int32Array, bool] | None:
        """Rows and chunks of running sequences, their blocks reserved, and whether any had to be preempted for it; None
        when there are no blocks as long as steps are in flight."""
        preempted = False
        while True:
            rows, chunks = self._running_chunks(in_flight)
            if self._kv_cache.reserve(rows, self._table.num_computed_tokens[rows] + chunks):
                return rows, chunks, preempted
            if in_flight:
                return None
            last = self._running[-1]
            if len(self._running) == 1:
                self._refuse(last, int(self._table.num_tokens[last.row]))
            else:
                self._preempt(last)
                preempted = True

    def _running_chunks(self, in_flight: bool) -> tuple[Int32Array, Int32Array]:
        """How far each running row gets in this step; rows that the budget does not reach are left out."""
        rows = self._rows_of_running()
        if in_flight:
            rows = rows[self._table.num_tokens[rows] < self._rows.max_total_tokens[rows]]
        wanted = self._table.num_tokens[rows] - self._table.num_computed_tokens[rows]
        if wanted.sum() <= self._budget:
            return rows, wanted
        budget_left = self._budget - (np.cumsum(wanted, dtype=np.int32) - wanted)
        chunks = np.clip(budget_left, 0, wanted)
        reached = chunks > 0
        return rows[reached], chunks[reached]

    def _admit_waiting(self, budget: int) -> tuple[Int32Array, Int32Array]:
        """Admits from the head of the queue while budget, rows and blocks last. The head waits until it fits.

        A request is admitted when all its known tokens would fit, though only the blocks of its first chunk are
        reserved: otherwise a long prompt would be admitted and preempted over and over. Nobody can take the rest of
        its blocks by admission, because its next chunks go first and leave no budget until its prompt is done.
        """
        rows: list[int] = []
        chunks: list[int] = []
        under_way: set[Key] | None = None
        while self._waiting and budget > 0:
            head = self._waiting[0]
            num_tokens = self._num_tokens(head)
            if self._kv_cache.blocks_for(num_tokens) > self._kv_cache.num_blocks:
                self._refuse(head, num_tokens)
                continue
            if not self._has_row(head):
                break
            prefix = self._kv_cache.find(self._rows.token_ids(head), head.request.prefix_salt)
            if not self._has_blocks(num_tokens, prefix):
                break
            if under_way is None:
                under_way = self._kv_cache.next_keys(self._rows_of_running())
            if prefix.missing in under_way:
                break  # a row computes its next block, now or in flight: it waits for it, and nobody overtakes it
            if self._take_row(head):
                chunk = min(budget, num_tokens - self._take_prefix(head, num_tokens, prefix))
                row, reach = np.array([head.row], np.int32), self._table.num_computed_tokens[head.row] + chunk
                self._kv_cache.reserve(row, np.array([reach], np.int32))
                under_way |= self._kv_cache.next_keys(row)
                budget -= chunk
                rows.append(head.row)
                chunks.append(chunk)
        return np.array(rows, np.int32), np.array(chunks, np.int32)

    def _has_blocks(self, num_tokens: int, prefix: Prefix) -> bool:
        """Whether there are blocks for all tokens; those that a running sequence holds already need none."""
        num_missing = self._kv_cache.blocks_for(num_tokens) - self._kv_cache.num_in_use(prefix)
        return num_missing <= self._kv_cache.num_free_blocks

    def _take_prefix(self, head: Sequence, num_tokens: int, prefix: Prefix) -> int:
        """Starts the sequence behind what the prefix cache has of it; returns how many tokens that is."""
        num_hit = self._kv_cache.take(head.row, prefix)
        self._table.num_computed_tokens[head.row] = num_hit
        if head.num_cached_tokens < 0:
            head.num_cached_tokens = min(num_hit, len(head.request.prompt_token_ids))
            self.num_queried_tokens += num_tokens
            self.num_hit_tokens += num_hit
        return num_hit

    def _has_row(self, sequence: Sequence) -> bool:
        return sequence.row >= 0 or self._rows.num_free > 0

    def _take_row(self, head: Sequence) -> bool:
        """Moves the head of the queue to the running sequences. False when the runner refused it, which ends it."""
        if head.row < 0 and (error := self._rows.fill(head)):
            self._waiting.pop(0)
            self._refused.append((head, error))
            return False
        self._waiting.pop(0)
        insort(self._running, head)
        self._running_rows = None
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, at the place of its key, with its tokens and its row but without its blocks."""
        self._discard(self._running, sequence)
        self._kv_cache.release(sequence.row)
        self._table.num_computed_tokens[sequence.row] = 0
        insort(self._waiting, sequence)
        self.num_preemptions += 1

    def _refuse(self, sequence: Sequence, num_tokens: int) -> None:
        """Ends a request that cannot go on even with the whole KV cache to itself."""
        self.remove(sequence)
        needed, kv_cache = self._kv_cache.blocks_for(num_tokens), self._kv_cache
        text = (
            f"the request has {num_tokens} tokens and needs {needed} KV blocks of {kv_cache.block_size} tokens, "
            f"expected at most {kv_cache.num_blocks}, the engine's whole KV cache"
        )
        self._refused.append((sequence, text))

    def _num_tokens(self, sequence: Sequence) -> int:
        if sequence.row >= 0:
            return int(self._table.num_tokens[sequence.row])
        return len(sequence.request.prompt_token_ids) + len(sequence.request.output_token_ids)

    def _rows_of_running(self) -> Int32Array:
        if self._running_rows is None:
            self._running_rows = np.array([sequence.row for sequence in self._running], np.int32)
        return self._running_rows

    def _discard(self, sequences: list[Sequence], sequence: Sequence) -> bool:
        """Takes the sequence out of a sorted list, if it is there."""
        index = bisect_left(sequences, sequence)
        if index == len(sequences) or sequences[index] is not sequence:
            return False
        del sequences[index]
        self._running_rows = None
        return True
