"""Scheduler and KV cache as a state machine, without a model: what a plan may and may not do, for each step.

The engine's own machine sees whether tokens come out right; this one sees the order in which requests are served, the
budget, which blocks are held when, and that what a request finds computed is the beginning of its own text, under its
own salt: each KV slot knows the text and the salt for which it was computed.
How to search with many more sequences: machine_settings.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.memory.kv_cache import KVCacheManager
from llmbackend.engine.scheduling.scheduler import Schedule, Scheduler
from llmbackend.engine.scheduling.sequence import Rows, Sequence
from llmbackend.engine.step import RowTable
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.engine_requests import priorities
from tests.helpers.machine_settings import machine_settings
from tests.helpers.mock_engine import make_request

MAX_MODEL_LEN = 32

prompt_lens = st.sampled_from((1, 2, 3, 5, 8, 12))
prompts = st.tuples(prompt_lens, st.sampled_from((0, 0, 1)), st.sampled_from((0, 0, 2, 5)))
"""Length, the text it is from, and where it leaves that text for one of its own (0 = nowhere)."""
salts = st.sampled_from(("", "", "", "a"))
Text = tuple[str, tuple[int, ...]]
"""Salt and tokens up to a position."""


@dataclass(frozen=True)
class Before:
    """What stood before a step: sequences in order, the first of each list the most important one."""

    running: list[Sequence]
    waiting: list[Sequence]
    num_tokens: dict[Sequence, int]
    num_missing: dict[Sequence, int]
    """Tokens of each one that are not computed."""


class SchedulerMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(-1, 3),
        num_rows=st.sampled_from((4, 2, 1)),
        budget=st.sampled_from((16, 5, 1)),
        caching=st.sampled_from((True, True, False)),
        num_host_blocks=st.sampled_from((0, 2, 20)),
    )
    def make(
        self, block_size: int, spare_blocks: int, num_rows: int, budget: int, caching: bool, num_host_blocks: int
    ) -> None:
        num_blocks = 12 // block_size + spare_blocks
        config = EngineConfig(model="mock", block_size=block_size, num_kv_blocks=num_blocks, max_num_seqs=num_rows)
        self.runner = MockRunner(config)
        self.table = RowTable(num_rows, MAX_MODEL_LEN, block_size)
        self.kv_cache = KVCacheManager(num_blocks, self.table, caching, num_host_blocks)
        self.caching = caching
        self.slots: list[Text | None] = [None] * (num_blocks * block_size)
        """The text that the KV of each slot belongs to."""
        self.host_slots: list[Text | None] = [None] * (num_host_blocks * block_size)
        self.rows = Rows(self.table, self.runner)
        self.scheduler = Scheduler(self.rows, self.kv_cache, budget)
        self.budget = budget
        self.arrivals = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @rule(
        target=sequences,
        prompt=prompts,
        priority=priorities,
        salt=salts,
        logit_bias=st.sampled_from(({}, {}, {9999: 1.0})),
    )
    def add(self, prompt: tuple[int, int, int], priority: int, salt: str, logit_bias: dict[int, float]) -> Sequence:
        """One request; the runner refuses a logit_bias beyond the vocabulary."""
        length, text, leaves_at = prompt
        own = 100 + self.arrivals
        tokens = [own if leaves_at and at >= leaves_at else 20 * text + at for at in range(length)]
        request = make_request(f"r{self.arrivals}", tokens, priority, logit_bias=logit_bias)
        sequence = Sequence(msgspec.structs.replace(request, cache_salt=salt), self.arrivals, self.runner.info)
        self.arrivals += 1
        self.waiting.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    @rule(target=sequences, prompts=st.lists(prompts, min_size=2, max_size=4))
    def add_crowd(self, prompts: list[tuple[int, int, int]]) -> MultipleResults[Any]:
        return multiple(*[self.add(prompt, 0, "", {}) for prompt in prompts])

    @rule(sequence=consumes(sequences))
    def remove(self, sequence: Sequence) -> None:
        if sequence in self.running or sequence in self.waiting:
            self._remove(sequence)

    @rule(sequence=consumes(sequences))
    def fail(self, sequence: Sequence) -> None:
        """What it computed is nonsense from here on, and none of it may be found."""
        if sequence in self.running:
            held = self.table.block_table[sequence.row, : self._held(sequence)].tolist()
            self.kv_cache.invalidate(sequence.row)
            self._remove(sequence)
            holders = {block for one in self.running for block in self._blocks(one)}
            for block in set(held) - holders:
                size = self.kv_cache.block_size
                self.slots[block * size : (block + 1) * size] = [None] * size

    @rule(count=st.sampled_from((1, 1, 5, 20)))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.kv_cache.check()
        self.rows.check()
        assert (self.scheduler.num_waiting, self.scheduler.num_running) == (len(self.waiting), len(self.running))
        used = {block for sequence in self.running for block in self._blocks(sequence)}
        assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks - len(used)
        assert self.kv_cache.num_cached_blocks == 0 or self.caching
        assert all(self._held(sequence) == 0 for sequence in self.waiting)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for sequence in self.running + self.waiting:
                self._remove(sequence)
            assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks
            assert self.rows.num_free == self.table.max_num_seqs

    # --- one step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = self._look()
        num_preemptions = self.scheduler.num_preemptions
        schedule = self.scheduler.schedule()
        chunks = self._chunks(schedule)
        for sequence, error in schedule.refused:
            self._expect_refusal(sequence, error, before)
        preempted = self._preempted(before, schedule)
        assert self.scheduler.num_preemptions - num_preemptions == len(preempted)
        still_running = [one for one in before.running if one in self.running]
        admitted = [one for one in chunks if one in before.waiting]
        self._expect_running_first(before, still_running, chunks)
        self._expect_admission_in_order(before, admitted, chunks, bool(preempted))
        self._move(admitted)
        self._copy_blocks()
        self._expect_own_texts(self.running)
        self._expect_blocks_of_the_step_alone(chunks)
        self._expect_progress(before, schedule, chunks)
        self._commit(schedule)
        self.conserved()

    def _look(self) -> Before:
        running, waiting = sorted(self.running), sorted(self.waiting)
        num_tokens = {one: self._num_tokens(one) for one in running + waiting}
        return Before(running, waiting, num_tokens, {one: n - self._num_computed(one) for one, n in num_tokens.items()})

    def _chunks(self, schedule: Schedule) -> dict[Sequence, int]:
        """Tokens by sequence, in the plan's order; the budget holds, each row comes once."""
        plan = schedule.plan
        if plan is None:
            return {}
        rows = plan.rows.tolist()
        assert len(set(rows)) == len(rows)
        assert plan.num_scheduled_tokens.min() >= 1
        assert plan.num_tokens <= self.budget
        reach = self.table.num_computed_tokens[plan.rows] + plan.num_scheduled_tokens
        assert (plan.sample_rows == (reach == self.table.num_tokens[plan.rows])).all()
        return {self.rows[row]: n for row, n in zip(rows, plan.num_scheduled_tokens.tolist(), strict=True)}

    def _expect_refusal(self, sequence: Sequence, error: str, before: Before) -> None:
        """Refused are requests that the runner does not take, and those that outgrew the whole pool."""
        if "logit_bias" in error:
            assert sequence.request.sampling.logit_bias
        else:
            assert "the engine's whole KV cache" in error
            assert self.kv_cache.min_blocks(before.num_tokens[sequence]) > self.kv_cache.num_blocks
        assert sequence.row == -1
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def _preempted(self, before: Before, schedule: Schedule) -> list[Sequence]:
        """Preempted are the least important of the running requests, and never the first."""
        refused = [sequence for sequence, _ in schedule.refused]
        left = [one for one in before.running if one not in refused]
        preempted = [one for one in left if one in self.scheduler._waiting]
        assert left[len(left) - len(preempted) :] == preempted, "a more important request was preempted"
        assert not left or left[0] not in preempted or refused, "the first running request was preempted"
        for one in preempted:
            self.running.remove(one)
            self.waiting.append(one)
        return preempted

    def _expect_running_first(self, before: Before, running: list[Sequence], chunks: dict[Sequence, int]) -> None:
        """Those that generate, then prompts, in their order, each as far as the budget goes; the first prompt gets a
        token at least when it comes before one that generates."""
        decodes = [one for one in running if before.num_missing[one] == 1]
        prompts = [one for one in running if before.num_missing[one] > 1]
        reached = decodes[: self.budget]
        if len(reached) == self.budget and prompts and prompts[0] < reached[-1]:
            reached.pop()
        for one in decodes:
            assert chunks.get(one, 0) == (one in reached)
        budget = self.budget - len(reached)
        for one in prompts:
            assert chunks.get(one, 0) == min(before.num_missing[one], budget)
            budget -= chunks.get(one, 0)

    def _expect_admission_in_order(
        self, before: Before, admitted: list[Sequence], chunks: dict[Sequence, int], preempted: bool
    ) -> None:
        """No request overtakes another, unless that waits for a block that is being computed. The head of the queue
        waits for a reason: budget, rows, blocks, a preemption, such a block."""
        queue = [one for one in before.waiting if one in self.waiting]
        assert admitted == [one for one in queue if one in admitted]
        for one in queue[: queue.index(admitted[-1])] if admitted else ():
            assert one in admitted or self._waits_for_a_block(one, before, chunks)
        assert not (preempted and admitted)
        budget = self.budget - sum(n for one, n in chunks.items() if one not in admitted)
        for one in admitted:
            num_found = self._num_computed(one)
            assert num_found % self.kv_cache.block_size == 0 and num_found < before.num_tokens[one]
            assert chunks[one] == min(before.num_missing[one] - num_found, budget)
            budget -= chunks[one]
        head = next((one for one in queue if one not in admitted), None)
        if head is not None and budget > 0 and not preempted:
            self._expect_reason_to_wait(head, before, chunks)

    def _expect_reason_to_wait(self, head: Sequence, before: Before, chunks: dict[Sequence, int]) -> None:
        no_row = head.row < 0 and self.rows.num_free == 0
        # The blocks of the last one admitted were counted free when the head was looked at, or are reserved now.
        no_blocks = self.kv_cache.min_blocks(before.num_missing[head]) > self.kv_cache.num_free_blocks
        assert no_row or no_blocks or self._waits_for_a_block(head, before, chunks), "the head waits for nothing"

    def _waits_for_a_block(self, waiting: Sequence, before: Before, chunks: dict[Sequence, int]) -> bool:
        return self.caching and any(self._computes_block_of(one, waiting, before) for one in chunks)

    def _computes_block_of(self, one: Sequence, head: Sequence, before: Before) -> bool:
        """Whether the block that the one computes now is wanted by the head of the queue."""
        block_end = (self._num_computed(one) // self.kv_cache.block_size + 1) * self.kv_cache.block_size
        return block_end <= min(self._num_shared(head, one), before.num_tokens[head] - 1)

    def _num_shared(self, one: Sequence, other: Sequence) -> int:
        """Tokens that both begin with, if what the one computes may serve the other."""
        if one.request.cache_salt != other.request.cache_salt:
            return 0
        pairs = zip(self.rows.token_ids(one).tolist(), self.rows.token_ids(other).tolist(), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _expect_own_texts(self, sequences: list[Sequence]) -> None:
        """What counts as computed of a sequence was computed for a text and a salt like its own."""
        for one in sequences:
            for position in range(self._num_computed(one)):
                assert self.slots[self._slot(one, position)] == self._text(one, position)

    def _copy_blocks(self) -> None:
        """Between device and host, in order; what was copied from has no owner any more."""
        size = self.kv_cache.block_size
        for copies in self.kv_cache.host_tier.take_copies():
            for block, host_block in zip(copies.blocks.tolist(), copies.host_blocks.tolist(), strict=True):
                on_device, on_host = (
                    slice(block * size, (block + 1) * size),
                    slice(host_block * size, (host_block + 1) * size),
                )
                if copies.to_host:
                    self.host_slots[on_host], self.slots[on_device] = self.slots[on_device], [None] * size
                else:
                    self.slots[on_device], self.host_slots[on_host] = self.host_slots[on_host], [None] * size

    def _move(self, admitted: list[Sequence]) -> None:
        for one in admitted:
            self.waiting.remove(one)
            self.running.append(one)

    def _expect_blocks_of_the_step_alone(self, chunks: dict[Sequence, int]) -> None:
        for one in self.running:
            num_tokens = self._num_computed(one) + chunks.get(one, 0)
            assert self._held(one) == self.kv_cache.min_blocks(num_tokens)

    def _expect_progress(self, before: Before, schedule: Schedule, chunks: dict[Sequence, int]) -> None:
        if before.running or before.waiting:
            assert chunks or schedule.refused, "no request runs and none is refused"

    def _commit(self, schedule: Schedule) -> None:
        if schedule.plan is not None:
            plan = schedule.plan
            for row, chunk in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True):
                one = self.rows[row]
                for position in range(self._num_computed(one), self._num_computed(one) + chunk):
                    self.slots[self._slot(one, position)] = self._text(one, position)
            self.table.num_computed_tokens[plan.rows] += plan.num_scheduled_tokens
            sampled = plan.rows[plan.sample_rows]
            self.table.token_ids[sampled, self.table.num_tokens[sampled]] = 90
            self.table.num_tokens[sampled] += 1
            self.kv_cache.register(plan.rows, self.table.num_computed_tokens[plan.rows])
            for one in [one for one in self.running if self._num_tokens(one) >= MAX_MODEL_LEN]:
                self._remove(one)

    # --- the state of a sequence --------------------------------------------------------------------------------------

    def _remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        assert sequence.row == -1
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def _num_tokens(self, sequence: Sequence) -> int:
        return int(self.table.num_tokens[sequence.row]) if sequence.row >= 0 else len(sequence.request.prompt_token_ids)

    def _num_computed(self, sequence: Sequence) -> int:
        return int(self.table.num_computed_tokens[sequence.row]) if sequence.row >= 0 else 0

    def _held(self, sequence: Sequence) -> int:
        return 0 if sequence.row < 0 else int(self.kv_cache._held[sequence.row])

    def _blocks(self, sequence: Sequence) -> list[int]:
        blocks: list[int] = self.table.block_table[sequence.row, : self._held(sequence)].tolist()
        return blocks

    def _slot(self, sequence: Sequence, position: int) -> int:
        block, offset = divmod(position, self.kv_cache.block_size)
        return int(self.table.block_table[sequence.row, block]) * self.kv_cache.block_size + offset

    def _text(self, sequence: Sequence, position: int) -> Text:
        tokens = self.table.token_ids[sequence.row, : position + 1].tolist()
        return sequence.request.cache_salt, tuple(tokens)


SchedulerMachine.TestCase.settings = machine_settings(examples=150, steps=40)
TestSchedulerMachine = SchedulerMachine.TestCase
