"""Decides which tokens the next step computes.

Used by the engine core; independent of logits, finish rules and processes. The idea: a request's num_computed_tokens
catches up with its num_tokens. Prefill, chunked prefill, decode and recomputation after a preemption are the same,
under one token budget per step: first decodes, then running prefills, then waiting requests, each in the order of
(priority, arrival). The cached prefix of a waiting request counts as computed on admission. A request whose next block
is being computed by a running one waits for it; later requests may overtake it, but take neither the row nor the blocks
that it needs.

A prompt is long while more of its tokens than a threshold are missing, not counting its cached prefix, which is looked
up only for the first of the long prompts that wait. Long prompts leave half of a step's prefill budget to shorter ones,
as far as those use it. A long prompt waits while another one of its own or a better priority is computed; shorter ones
overtake it. So short prompts do not wait behind long ones, and long ones do not starve. A StepPacer (step_pacing.py)
may limit a step's prefill budget while requests decode.

Invariants: exactly the blocks for a step's tokens are reserved before it runs; only running sequences hold blocks; a
step that had to preempt admits no request, and the first running sequence is never preempted, so some request always
advances. The scheduler owns the waiting and running lists, and resets num_computed_tokens to 0.

The tokens of steps in flight count as known and computed. A request whose last token is among them is not scheduled
again. No request is preempted or refused for lack of blocks until all of them have been read, because requests that
they finish free blocks. So only running rows have unread tokens, never waiting ones.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from ..memory.kv_cache import NOT_SHARED, KVCacheManager
from ..memory.prefix_cache import Key, Prefix
from ..reports import WaitReason
from ..step import PENDING_TOKEN, BoolArray, Int32Array, StepPlan
from .sequence import Rows, Sequence
from .step_pacing import StepBudget, StepPacer

COSTLY_MASK_S, COSTLY_MASKS_OF_A_STEP_S = 0.001, 0.01
"""Rows whose masks take longer than the first value share the second per step, or run as a single row. A typical mask
takes about 20 µs, but a grammar can be crafted to take milliseconds."""
MAX_OVERTAKEN = 16
"""Maximum number of requests overtaken per step while they wait for a prefix; each costs a prefix-cache lookup."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The scheduler's decision.

    plan     None = nothing can run
    refused  requests that end here, with the message for the client
    """

    plan: StepPlan | None
    refused: list[tuple[Sequence, str]]


class Scheduler:
    def __init__(
        self,
        rows: Rows,
        kv_cache: KVCacheManager,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = sys.maxsize,
        pacer: StepPacer | None = None,
    ) -> None:
        """pacer: limits the duration of steps with decodes; None = only the token budget limits a step."""
        self._rows = rows
        self._table = rows.table
        self._kv_cache = kv_cache
        self._budget = max_num_batched_tokens
        self._threshold = long_prefill_token_threshold
        self._pacer = pacer
        self._waiting: list[Sequence] = []
        self._long_waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._running_rows: Int32Array | None = None
        self._refused: list[tuple[Sequence, str]] = []
        self._costly_turn = 0
        """Which of the rows with costly masks comes first in the next step."""
        self.wait_reason: WaitReason = "token_budget"
        """Why the latest plan admitted no further request."""
        self.preempted: list[Sequence] = []
        """By the latest plan."""
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        """Tokens of requests that were looked up in the prefix cache, at their first admission, and how many of them
        were found."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._long_waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def waiting(self) -> list[Sequence]:
        """In queue order."""
        return sorted([*self._waiting, *self._long_waiting])

    def add(self, sequence: Sequence) -> None:
        insort(self._queue_of(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends the sequence in any state: its blocks and its row are free at once, even while a step that computes them
        is in flight (see kv_cache.py)."""
        if not self._discard(self._running, sequence):
            self._discard(self._queue_of(sequence), sequence)
        if sequence.row >= 0:
            self._kv_cache.release(sequence.row)
            self._rows.release(sequence)

    def schedule(self, in_flight: bool = False) -> Schedule:
        """Plans one step and reserves its blocks. in_flight: whether launched steps have not been read yet."""
        self._refused, self.preempted = [], []
        continued = self._continue_running(in_flight)
        if continued is None:
            return Schedule(None, [])
        rows, chunks, budget, preempted = continued
        if preempted:
            self.wait_reason = "kv_blocks"
        elif self.num_waiting:
            new_rows, new_chunks = self._admit_waiting(budget)
            rows = np.concatenate([rows, new_rows])
            chunks = np.concatenate([chunks, new_chunks])
        if budget.is_shared and not budget.is_spent:
            self._extend_long(rows, chunks, budget)
        self._kv_cache.plan(rows, chunks)
        return Schedule(self._plan(rows, chunks) if len(rows) else None, self._refused)

    def _plan(self, rows: Int32Array, chunks: Int32Array) -> StepPlan:
        table = self._table
        return StepPlan(rows, chunks, table.num_computed_tokens[rows] + chunks == table.num_tokens[rows])

    def _continue_running(self, in_flight: bool) -> tuple[Int32Array, Int32Array, StepBudget, bool] | None:
        """Rows and chunks of running sequences with reserved blocks, the budget left for waiting prompts, and whether a
        row was preempted. None if blocks are lacking while steps are in flight."""
        preempted = False
        while True:
            rows, chunks, budget = self._running_chunks(in_flight)
            if self._kv_cache.reserve(rows, self._table.num_computed_tokens[rows] + chunks):
                return rows, chunks, budget, preempted
            if in_flight:
                return None
            last = self._running[-1]
            if len(self._running) == 1:
                self._refuse(last, int(self._table.num_tokens[last.row]))
            else:
                self._preempt(last)
                preempted = True

    def _running_chunks(self, in_flight: bool) -> tuple[Int32Array, Int32Array, StepBudget]:
        """The running rows that this step computes, the tokens of each, and the budget left for waiting prompts."""
        rows = self._rows_of_running()
        if in_flight:
            rows = rows[self._table.num_tokens[rows] < self._rows.max_total_tokens[rows]]
            if self._rows.constraints:
                rows = rows[self._may_follow(rows)]
        if self._rows.constraints:
            rows = self._without_costly_masks(rows)
        chunks = self._table.num_tokens[rows] - self._table.num_computed_tokens[rows]
        is_prompt = chunks > 1
        decodes = (~is_prompt).nonzero()[0]
        num_decodes = min(len(decodes), self._budget)
        if 0 < num_decodes == self._budget and is_prompt[: decodes[num_decodes - 1]].any():
            num_decodes -= 1  # a prompt ahead of some of them in order gets a token
        tokens_left = self._budget - num_decodes
        budget = StepBudget(tokens_left)
        if self._pacer is not None:
            num_prompts = int(np.count_nonzero(is_prompt)) + min(self.num_waiting, self._rows.num_free)
            budget = self._pacer.budget(tokens_left, num_decodes, num_prompts)
        if num_decodes == len(rows):
            return rows, chunks, budget
        chunks[decodes[num_decodes:]] = 0
        self._cut_prompts(rows, chunks, is_prompt, budget)
        reached = chunks > 0
        return rows[reached], chunks[reached], budget

    def _may_follow(self, rows: Int32Array) -> BoolArray:
        """bool [rows]: excludes constrained rows whose last token is still unread, since masks depend on it."""
        is_constrained = np.isin(rows, list(self._rows.constraints))
        last_token_ids = self._table.token_ids[rows, self._table.num_tokens[rows] - 1]
        may_follow: BoolArray = ~is_constrained | (last_token_ids != PENDING_TOKEN)
        return may_follow

    def _without_costly_masks(self, rows: Int32Array) -> Int32Array:
        """The rows without some of those with costly masks, which take turns so that the other rows' steps do not wait
        for all of them."""
        constraints = self._rows.constraints
        costs_s = {row: constraints[row].mask_s for row in rows.tolist() if row in constraints}
        costly = [row for row, cost_s in costs_s.items() if cost_s > COSTLY_MASK_S]
        if sum(costs_s[row] for row in costly) <= COSTLY_MASKS_OF_A_STEP_S:
            return rows
        first, spent_s, num_kept = self._costly_turn % len(costly), 0.0, 0
        order = costly[first:] + costly[:first]
        while num_kept < len(order) and (not num_kept or spent_s + costs_s[order[num_kept]] < COSTLY_MASKS_OF_A_STEP_S):
            spent_s += costs_s[order[num_kept]]
            num_kept += 1
        self._costly_turn += num_kept
        kept: Int32Array = rows[~np.isin(rows, order[num_kept:])]
        return kept

    def _cut_prompts(self, rows: Int32Array, chunks: Int32Array, is_prompt: BoolArray, budget: StepBudget) -> None:
        """Cuts the chunks of running prompts to the budget, in their order."""
        is_long = chunks > self._threshold
        long, shorter = (is_prompt & is_long).nonzero()[0].tolist(), (is_prompt & ~is_long).nonzero()[0].tolist()
        for_long = None
        if long and (shorter or self._waiting or (self._long_waiting and self._may_begin(self._long_waiting[0]))):
            for_long = budget.halved()
        # Long prompts first, from their half; shorter ones get the rest.
        for i in [*long, *shorter]:
            computed = int(self._table.num_computed_tokens[rows[i]])
            wanted = min(int(chunks[i]), self._kv_cache.max_chunk(computed + int(chunks[i])))
            chunks[i] = _take(wanted, computed, budget, for_long if is_long[i] else None)

    def _extend_long(self, rows: Int32Array, chunks: Int32Array, budget: StepBudget) -> None:
        """Gives long prompts what they left to shorter ones that do not use it, such as waiting ones without blocks."""
        num_tokens, computed = self._table.num_tokens[rows], self._table.num_computed_tokens[rows]
        for i in (num_tokens - computed > self._threshold).nonzero()[0].tolist():
            context, chunk = int(computed[i]), int(chunks[i])
            wanted = min(int(num_tokens[i]) - context, self._kv_cache.max_chunk(int(num_tokens[i])))
            budget.spend(context, -chunk)
            extended = budget.affordable_tokens(context, wanted)
            if extended > chunk and self._kv_cache.reserve(rows[i : i + 1], computed[i : i + 1] + extended):
                chunk = extended
            budget.spend(context, chunk)
            chunks[i] = chunk

    def _admit_waiting(self, budget: StepBudget) -> tuple[Int32Array, Int32Array]:
        """Admits from the head of the queue while budget, rows and blocks suffice. The head waits until it fits, and is
        overtaken only while it waits for a prefix.

        A request is admitted only if all its known tokens would fit next to those of running prompts, minus what chunks
        free behind a window, although only the blocks of its first chunk are reserved. Otherwise a long prompt would be
        admitted and preempted repeatedly.
        """
        rows: list[int] = []
        chunks: list[int] = []
        being_computed: set[Key] | None = None
        unreserved = -1
        overtaken: set[Sequence] = set()
        self.wait_reason = "token_budget"
        while not budget.is_spent and (head := self._head(overtaken)) is not None:
            num_tokens = self._num_tokens(head)
            max_chunk = min(self._kv_cache.max_chunk(num_tokens), self._budget)
            if not max_chunk:
                self._refuse(head, num_tokens)
                continue
            if head.row < 0 and self._rows.num_free <= sum(one.row < 0 for one in overtaken):
                self.wait_reason = "max_num_seqs"
                break
            if unreserved < 0:
                unreserved = self._kv_cache.future_blocks(self._rows_of_running(), self._budget)
            prefix = self._cached_prefix(head)
            needed = self._kv_cache.blocks_to_begin(prefix, num_tokens, max_chunk)
            if needed + unreserved > self._kv_cache.num_free_blocks:
                self.wait_reason = "kv_blocks"
                break
            if not self._kv_cache.has_state_slot:
                self.wait_reason = "state_slots"
                break
            if being_computed is None:
                being_computed = self._kv_cache.next_keys(self._rows_of_running())
            if prefix.missing in being_computed:
                self.wait_reason = "prefix"
                if len(overtaken) == MAX_OVERTAKEN:
                    break
                overtaken.add(head)
                unreserved += needed
                continue
            if self._take_row(head):
                num_hit = self._take_prefix(head, num_tokens, prefix)
                has_shorter = num_tokens - num_hit > self._threshold and bool(self._waiting)
                wanted = min(num_tokens - num_hit, max_chunk)
                chunk = _take(wanted, num_hit, budget, budget.halved() if has_shorter else None)
                row, reach = np.array([head.row], np.int32), np.array([num_hit + chunk], np.int32)
                self._kv_cache.reserve(row, reach)
                unreserved += self._kv_cache.future_blocks(row, max_chunk)
                being_computed |= self._kv_cache.next_keys(row)
                rows.append(head.row)
                chunks.append(chunk)
        return np.array(rows, np.int32), np.array(chunks, np.int32)

    def _head(self, overtaken: Set[Sequence]) -> Sequence | None:
        """The next to be admitted. Shorter prompts overtake a long one that waits for another."""
        shorter, long = (
            next((one for one in queue if one not in overtaken), None) for queue in (self._waiting, self._long_waiting)
        )
        if long is None or (shorter is not None and shorter < long):
            return shorter
        if self._may_begin(long):
            return long
        if shorter is None:
            self.wait_reason = "long_prefill"
        return shorter

    def _may_begin(self, long: Sequence) -> bool:
        """Whether a waiting long prompt need not wait for running ones: none of them has the same or a better
        priority, or few of its tokens are missing behind its cached prefix."""
        rows = self._rows_of_running()
        missing = self._table.num_tokens[rows] - self._table.num_computed_tokens[rows]
        running = [self._rows[row] for row in rows[missing > self._threshold].tolist()]
        if all(long.key[0] < one.key[0] for one in running):
            return True
        num_cached = len(self._cached_prefix(long).blocks) * self._kv_cache.block_size
        return self._num_tokens(long) - num_cached <= self._threshold

    def _cached_prefix(self, waiting: Sequence) -> Prefix:
        """The prefix after which a waiting sequence could start now."""
        request, token_ids = waiting.request, self._rows.token_ids(waiting)
        if self._rows.wanted_prompt_logprobs(waiting) is not None:
            token_ids = token_ids[:1]  # a cached prefix has no logits
        waiting.found = self._kv_cache.find(token_ids, request.prefix_salt, request.prefix_group, waiting.found)
        return self._kv_cache.usable(waiting.found)

    def _queue_of(self, sequence: Sequence) -> list[Sequence]:
        """The queue of a sequence that is not running."""
        return self._long_waiting if self._num_tokens(sequence) > self._threshold else self._waiting

    def _take_prefix(self, head: Sequence, num_tokens: int, prefix: Prefix) -> int:
        """Starts the sequence after its cached prefix; returns the length of the prefix."""
        num_hit = self._kv_cache.take(head.row, prefix)
        head.found = None
        self._table.num_computed_tokens[head.row] = num_hit
        if head.num_cached_tokens < 0:
            head.num_cached_tokens = min(num_hit, len(head.request.prompt_token_ids))
            if prefix.parent != NOT_SHARED and self._rows.wanted_prompt_logprobs(head) is None:
                self.num_queried_tokens += num_tokens
                self.num_hit_tokens += num_hit
        return num_hit

    def _take_row(self, head: Sequence) -> bool:
        """Moves a waiting sequence to the running list. False if the runner refuses it, which ends it."""
        self._discard(self._queue_of(head), head)
        if head.row < 0 and (error := self._rows.fill(head)):
            self._refused.append((head, error))
            return False
        insort(self._running, head)
        self._running_rows = None
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Puts the sequence back into the queue, with its tokens and its row but without its blocks."""
        self._discard(self._running, sequence)
        self._kv_cache.release(sequence.row)
        until = self._rows.recompute_until
        until[sequence.row] = max(until[sequence.row], self._table.num_computed_tokens[sequence.row])
        self._table.num_computed_tokens[sequence.row] = 0
        self.preempted.append(sequence)
        insort(self._queue_of(sequence), sequence)
        self.num_preemptions += 1

    def _refuse(self, sequence: Sequence, num_tokens: int) -> None:
        """Ends a request that does not fit in the whole KV cache."""
        self.remove(sequence)
        needed, kv_cache = self._kv_cache.min_blocks(num_tokens), self._kv_cache
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
        """Removes the sequence from a sorted list; returns whether it was there."""
        index = bisect_left(sequences, sequence)
        if index == len(sequences) or sequences[index] is not sequence:
            return False
        del sequences[index]
        self._running_rows = None
        return True


def _take(wanted: int, context: int, budget: StepBudget, part: StepBudget | None) -> int:
    """Spends the budget on a prompt's next tokens, after `context` others; returns how many. part: a share of the
    budget that also limits them."""
    chunk = budget.affordable_tokens(context, wanted)
    if part is not None:
        chunk = min(chunk, part.affordable_tokens(context, wanted))
        part.spend(context, chunk)
    budget.spend(context, chunk)
    return chunk
