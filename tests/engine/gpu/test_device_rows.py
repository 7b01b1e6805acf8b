"""Rows on the device, told by differences, give each step the batch that the host's own table gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmbackend.engine.gpu.device_rows import DeviceRows, Padded, StepMessage, StepMessages, section_words
from llmbackend.engine.gpu.ops.ops import PADDING_SLOT, Ops, StepLayout
from llmbackend.engine.gpu.ops.torch_ops import TorchOps
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from llmbackend.engine.gpu.row_messages import num_sequences
from llmbackend.engine.step import PENDING_TOKEN, RowTable, StepPlan, flatten
from tests.helpers.gpu.fake_device import FakeDevice

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 6, 70, 4, 90
MAX_TOKENS = MAX_NUM_SEQS * MAX_MODEL_LEN
MAX_DRAFTS, MAX_SEQUENCES = 3, 4 * MAX_NUM_SEQS


class Host:
    """A changing table, and the device's rows that follow it. Two steps are in flight at a time."""

    def __init__(self, seed: int, ops: Ops) -> None:
        self.draw = np.random.default_rng(seed)
        self.table = RowTable(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE)
        self.table.block_table[:] = self.draw.integers(0, NUM_BLOCKS, self.table.block_table.shape)
        self.device = FakeDevice()
        limits = MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, MAX_SEQUENCES
        self.messages = StepMessages(self.device, *limits, 2)
        self.rows = DeviceRows(torch.device("cpu"), ops, *limits, self.messages.max_words, MAX_TOKENS)
        self.live: set[int] = set()
        self.known = self.table.token_ids.copy()
        """The table with what the device sampled and the host has not read."""

    def admit(self, row: int) -> None:
        table, length = self.table, int(self.draw.integers(1, 40))
        if row in self.live:
            self.messages.remove(row)
        self.messages.add(row)
        self.live.add(row)
        self.known[row, :length] = table.token_ids[row, :length] = self.draw.integers(0, 1000, length)
        table.num_tokens[row], table.num_computed_tokens[row] = length, 0
        table.num_prompt_tokens[row] = self.draw.integers(1, length + 1)
        self.new_blocks(row)

    def new_blocks(self, row: int) -> None:
        """As after a preemption, or when the prefix cache had some of them."""
        self.table.block_table[row] = self.draw.integers(0, NUM_BLOCKS, self.table.block_table.shape[1])
        self.table.num_computed_tokens[row] = self.draw.integers(0, self.table.num_tokens[row])

    def churn(self) -> None:
        for row in range(MAX_NUM_SEQS):
            what = self.draw.random()
            if row not in self.live or what < 0.1 or self.table.num_tokens[row] > MAX_MODEL_LEN - 2 - MAX_DRAFTS:
                self.admit(row)
            elif what < 0.2:
                self.new_blocks(row)
            elif what < 0.3:
                column = self.draw.integers(self.table.block_table.shape[1])
                self.table.block_table[row, column] = self.draw.integers(NUM_BLOCKS)

    def plan(self, decode: bool) -> StepPlan:
        table, count = self.table, self.draw.integers(1, MAX_NUM_SEQS + 1)
        rows = self.draw.permutation(MAX_NUM_SEQS)[:count].astype(np.int32)
        if decode:
            table.num_computed_tokens[rows] = table.num_tokens[rows] - 1
        left = table.num_tokens[rows] - table.num_computed_tokens[rows]
        counts = np.minimum(left, self.draw.integers(1, 30, len(rows))).astype(np.int32)
        samples = counts == left
        drafts = (samples * self.draw.integers(0, MAX_DRAFTS + 1, len(rows))).astype(np.int32)
        if self.draw.random() < 0.5 or not drafts.any():
            return StepPlan(rows, counts, samples)
        for row, count in zip(rows.tolist(), drafts.tolist(), strict=True):
            places = slice(table.num_tokens[row], table.num_tokens[row] + count)
            self.known[row, places] = table.token_ids[row, places] = self.draw.integers(0, 1000, count)
        return StepPlan(rows, counts + drafts, samples, drafts)

    def padded(self, plan: StepPlan, decode: bool) -> Padded | None:
        """To more rows or tokens; now and then to none."""
        if decode:
            num_rows = int(self.draw.integers(num_sequences(plan), MAX_SEQUENCES + 1))
            return Padded(num_rows, num_rows, True)
        num_tokens = plan.num_tokens + int(self.draw.integers(3)) * 7
        return Padded(MAX_SEQUENCES, num_tokens, False) if self.draw.random() < 0.7 else None

    def sample(self, plan: StepPlan) -> None:
        """Moves on as if the plan was launched, and no draft held: what it samples is known to the device alone."""
        table = self.table
        rows, places = plan.samples(table)
        every = self.draw.integers(1000, 2000, len(rows)).astype(np.int32)
        drafts = 0 if plan.num_draft_tokens is None else plan.num_draft_tokens
        table.num_computed_tokens[plan.rows] += plan.num_scheduled_tokens - drafts
        sampled = plan.rows[plan.sample_rows]
        positions = table.num_tokens[sampled]
        token_ids = every[places == table.num_tokens[rows]]
        self.known[sampled, positions], table.token_ids[sampled, positions] = token_ids, PENDING_TOKEN
        table.num_tokens[sampled] += 1
        where = torch.from_numpy(rows), torch.from_numpy(places), torch.from_numpy(every)
        self.device.enqueue(lambda: self.rows.put(*where))


@pytest.mark.parametrize(("seed", "ops"), [(0, TorchOps()), (1, TorchOps()), (2, TorchOps()), (3, TritonOps())])
def test_the_batch_is_that_of_the_hosts_table(seed: int, ops: Ops) -> None:
    host, found = Host(seed, ops), []
    for _ in range(40):
        host.churn()
        decode = bool(host.draw.integers(2))
        plan = host.plan(decode)
        message = host.messages.write(plan, host.table, host.padded(plan, decode))
        if host.draw.random() < 0.2:
            continue  # the launch failed
        layouts: list[StepLayout] = []
        host.device.enqueue(lambda message=message, to=layouts: to.append(copied(host, message)))  # type: ignore[misc]
        host.messages.sent(message, host.device.record())
        found.append((expectation(host, plan), layouts))
        host.sample(plan)
    host.device.synchronize()
    assert len(found) > 20
    for expected, layouts in found:
        check(layouts[0], *expected)


def copied(host: Host, message: StepMessage) -> StepLayout:
    """The layout; in the place of rows' numbers the blocks and lengths of prompts that the device has for them; with
    samples' places in the batch their rows and positions."""
    host.rows.upload(message)
    layout = host.rows.layout(message.shape)
    values = {name: getattr(layout, name) for name in StepLayout.__slots__}
    values |= {name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
    samples = host.rows.samples(message.shape.num_samples)
    values["sampled_tokens"] = torch.stack((layout.sampled_tokens, *samples))
    values["rows"] = torch.cat((layout.rows[:, None], host.rows.num_prompt_tokens[layout.rows][:, None],
                                host.rows.block_table[layout.rows]), dim=1)  # fmt: skip
    return StepLayout(**values)


def expectation(host: Host, plan: StepPlan) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What the CPU path makes of the plan, and each row with its prompt's length and its blocks up to the last one."""
    step = flatten(plan, host.table)
    expected = {name: getattr(step, name).copy() for name in ("positions", "slots")}
    rows, query_lens, expected["seq_lens"] = sequences(plan, host.table)
    expected["query_start"] = np.append(np.zeros(1, np.int32), np.cumsum(query_lens, dtype=np.int32))
    token_rows = np.repeat(plan.rows, plan.num_scheduled_tokens)
    expected["token_ids"] = host.known[token_rows, step.positions]
    expected["sampled_tokens"] = np.stack((step.sampled_tokens, *plan.samples(host.table)))
    blocks = host.table.block_table[rows].copy()
    blocks[np.arange(blocks.shape[1]) >= -(-expected["seq_lens"] // BLOCK_SIZE)[:, None]] = -1
    prompts = host.table.num_prompt_tokens[rows]
    return expected, np.concatenate((rows[:, None], prompts[:, None], blocks), axis=1)


def sequences(plan: StepPlan, table: RowTable) -> np.ndarray:
    """Row, tokens to compute and length of each sequence: a row's known tokens, then its drafts one by one."""
    found = []
    drafts = [0] * len(plan.rows) if plan.num_draft_tokens is None else plan.num_draft_tokens.tolist()
    for row, count, num_drafts in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), drafts, strict=True):
        length = int(table.num_computed_tokens[row]) + count - num_drafts
        found.append((row, count - num_drafts, length))
        found += [(row, 1, length + place) for place in range(1, num_drafts + 1)]
    return np.array(found, np.int32).T


def check(layout: StepLayout, expected: dict[str, np.ndarray], rows: np.ndarray) -> None:
    count = len(rows)
    for name, value in expected.items():
        given = getattr(layout, name).numpy()
        assert given.dtype == np.int32
        np.testing.assert_array_equal(given[..., : value.shape[-1]], value, err_msg=name)
    seen = layout.rows.numpy()[:count]
    np.testing.assert_array_equal(np.where(rows < 0, -1, seen), rows)
    num_tokens = len(expected["positions"])
    assert not layout.seq_lens[count:].any() and not layout.rows[count:, 0].any()
    assert (layout.slots[num_tokens:] == PADDING_SLOT).all()
    assert not layout.token_ids[num_tokens:].any() and not layout.positions[num_tokens:].any()
    if len(layout.sampled_tokens[0]) > expected["sampled_tokens"].shape[1]:  # padding that a graph samples
        assert layout.query_start.tolist() == list(range(len(layout.seq_lens) + 1))
        assert layout.sampled_tokens[0].tolist() == list(range(len(layout.seq_lens)))
    elif len(layout.seq_lens) < len(layout.slots):
        assert (layout.query_start[count:] == num_tokens).all()


def test_only_what_changed_is_told_again() -> None:
    host = Host(0, TorchOps())
    for row in range(MAX_NUM_SEQS):
        host.admit(row)
    host.table.num_computed_tokens[:] = host.table.num_tokens - 1
    plan = StepPlan(np.arange(6, dtype=np.int32), np.ones(6, np.int32), np.ones(6, np.bool_))
    first = host.messages.write(plan, host.table)
    assert len(first.changes.token_ids) == host.table.num_tokens.sum()
    host.messages.sent(first, host.device.record())
    assert host.messages.write(plan, host.table).changes.blocks.size == 0
    host.table.block_table[3, 0] += 1
    second = host.messages.write(plan, host.table)
    assert (second.changes.blocks.shape, second.changes.prompts.size) == ((3, 1), 0)
    assert len(second.words) == 6 * section_words(MAX_SEQUENCES) + 3


def test_many_long_prompts_at_once_get_memory_of_their_own() -> None:
    host = Host(1, TorchOps())
    for row in range(MAX_NUM_SEQS):
        host.admit(row)
        host.table.num_tokens[row] = 60
        host.known[row, :60] = host.table.token_ids[row, :60] = np.arange(60) + row
    host.table.num_computed_tokens[:] = 59
    plan = StepPlan(np.arange(6, dtype=np.int32), np.ones(6, np.int32), np.ones(6, np.bool_))
    message = host.messages.write(plan, host.table)
    assert len(message.words) > host.messages.max_words
    expected = expectation(host, plan)
    check(copied(host, message), *expected)
    np.testing.assert_array_equal(host.rows.token_table[:, :60].numpy(), host.known[:, :60])


@pytest.mark.parametrize("ops", [TorchOps(), TritonOps()])
def test_a_token_that_is_none_is_stored_as_one_that_exists(ops: Ops) -> None:
    rows = Host(2, ops).rows
    rows.token_table[2, 5] = 7
    where = torch.tensor([2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    rows.put(*where, torch.tensor([-1], dtype=torch.int32))
    assert rows.token_table[2, 5] == 0
