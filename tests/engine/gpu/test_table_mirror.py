"""A follower's table holds what rank 0's does, told by differences alone."""

from __future__ import annotations

import msgspec
import numpy as np

from llmbackend.engine.gpu.parallel.links import Message, Step, TableSender, apply
from llmbackend.engine.step import PENDING_TOKEN, RowTable, StepPlan

ROWS, LENGTH, BLOCK = 5, 64, 4


def told(sender: TableSender, plan: StepPlan, table: RowTable) -> Step:
    """Over the wire."""
    data = msgspec.msgpack.encode(sender.step(3, plan, table))
    step = msgspec.msgpack.decode(data, type=Message)
    assert isinstance(step, Step)
    return step


def expect_same(plan: StepPlan, got: StepPlan, table: RowTable, mirror: RowTable) -> None:
    """All of the plan, and of the table what a runner may read."""
    np.testing.assert_array_equal(plan.rows, got.rows)
    np.testing.assert_array_equal(plan.num_scheduled_tokens, got.num_scheduled_tokens)
    np.testing.assert_array_equal(plan.sample_rows, got.sample_rows)
    drafts = np.zeros(len(plan.rows), np.int32) if plan.num_draft_tokens is None else plan.num_draft_tokens
    assert (plan.num_draft_tokens is None) == (got.num_draft_tokens is None)
    for i, row in enumerate(plan.rows.tolist()):
        for name in ("num_tokens", "num_prompt_tokens", "num_computed_tokens"):
            assert getattr(table, name)[row] == getattr(mirror, name)[row]
        length = int(table.num_tokens[row] + drafts[i])
        np.testing.assert_array_equal(table.token_ids[row, :length], mirror.token_ids[row, :length])
        used = -(-int(table.num_computed_tokens[row] + plan.num_scheduled_tokens[i]) // BLOCK)
        np.testing.assert_array_equal(table.block_table[row, :used], mirror.block_table[row, :used])


class Engine:
    """What an engine core does to its table, at random."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.table, self.mirror = RowTable(ROWS, LENGTH, BLOCK), RowTable(ROWS, LENGTH, BLOCK)
        self.sender = TableSender(ROWS)
        for row in range(ROWS):
            self.admit(row)

    def admit(self, row: int) -> None:
        length = int(self.random.integers(1, 30))
        self.sender.forget(row)
        self.table.token_ids[row, :length] = self.random.integers(0, 90, length)
        self.table.num_tokens[row] = self.table.num_prompt_tokens[row] = length
        self.start_over(row)

    def start_over(self, row: int) -> None:
        """As after a preemption: other blocks, and everything is computed again."""
        self.table.num_computed_tokens[row] = 0
        self.table.block_table[row] = self.random.permutation(self.table.block_table.shape[1])

    def step(self) -> None:
        rows = self.random.permutation(ROWS)[: self.random.integers(1, ROWS + 1)].astype(np.int32)
        waiting = self.table.num_tokens[rows] - self.table.num_computed_tokens[rows]
        counts = np.minimum(waiting, self.random.integers(1, 12, len(rows))).astype(np.int32)
        samples = counts == waiting
        drafts = None
        if self.random.random() < 0.3:
            drafts = np.where(samples, self.random.integers(0, 3, len(rows)), 0).astype(np.int32)
            counts = counts + drafts
            for row, count in zip(rows.tolist(), drafts.tolist(), strict=True):
                end = self.table.num_tokens[row]
                self.table.token_ids[row, end : end + count] = self.random.integers(0, 90, count)
        plan = StepPlan(rows, counts, samples, drafts)
        expect_same(plan, apply(told(self.sender, plan, self.table), self.mirror), self.table, self.mirror)
        self.table.num_computed_tokens[rows] += counts - (0 if drafts is None else drafts)
        self.sample(rows[samples])

    def sample(self, rows: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Some tokens are known now, others one step later."""
        for row in rows.tolist():
            end = int(self.table.num_tokens[row])
            if end >= LENGTH - 4:
                self.admit(row)
                continue
            known = self.random.random() < 0.5
            self.table.token_ids[row, end] = self.random.integers(0, 90) if known else PENDING_TOKEN
            self.table.num_tokens[row] += 1
            if self.random.random() < 0.1:
                self.start_over(row)

    def read_pending(self) -> None:
        pending = self.table.token_ids == PENDING_TOKEN
        self.table.token_ids[pending] = self.random.integers(0, 90, int(pending.sum()))


def test_a_mirror_holds_what_a_runner_reads() -> None:
    for seed in range(20):
        engine = Engine(seed)
        for number in range(60):
            engine.step()
            if number % 2:
                engine.read_pending()


def test_a_decode_step_tells_what_is_new_and_no_more() -> None:
    table, sender = RowTable(256, 8192, 16), TableSender(256)
    rows = np.arange(256, dtype=np.int32)
    table.num_tokens[:] = 4000
    ones, samples = np.ones(256, np.int32), np.ones(256, np.bool_)
    first = len(msgspec.msgpack.encode(sender.step(0, StepPlan(rows, table.num_tokens.copy(), samples), table)))
    assert first > 4 * 256 * 4000
    table.num_computed_tokens[:] = 4000
    table.num_tokens += 1
    assert len(msgspec.msgpack.encode(sender.step(1, StepPlan(rows, ones, samples), table))) < 256 * 60
