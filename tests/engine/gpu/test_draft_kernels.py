"""Lookups, positions and acceptance of drafts on the device are those of their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmbackend.engine.gpu.ops.ops import Ops
from llmbackend.engine.gpu.ops.torch_ops import TorchOps
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from llmbackend.engine.gpu.row_messages import NUM_FIELDS, drafted_rows
from llmbackend.engine.scheduling.steps_in_flight import num_accepted, num_equal_drafts
from llmbackend.engine.step import NO_TOKEN, PENDING_TOKEN, LookupLengths, RowTable, SampledTokens, StepPlan, look_up

MAX_NUM_SEQS, MAX_MODEL_LEN, MOST = 6, 5000, 40
ROOM = MAX_NUM_SEQS * (MOST + 1)
OPS = [TorchOps(), TritonOps()]


def tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32))


class Step:
    """Rows of random lengths, of which the host thinks that some are longer, with and without drafts, beside a prompt.
    Texts have few different tokens, so that they repeat."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = np.random.default_rng(seed)
        self.host = table = RowTable(MAX_NUM_SEQS, MAX_MODEL_LEN, 16)
        self.texts = draw.integers(0, 3, table.token_ids.shape).astype(np.int32)
        self.lengths = draw.choice([1, 2, 30, 4097, MAX_MODEL_LEN - 2 * MOST], MAX_NUM_SEQS).astype(np.int32)
        pending = draw.integers(0, 4, MAX_NUM_SEQS).astype(np.int32)
        self.missing = (pending * draw.random(MAX_NUM_SEQS)).astype(np.int32)
        table.num_tokens[:], table.num_pending_drafts[:] = self.lengths + self.missing, pending
        table.num_computed_tokens[:] = table.num_tokens - 1
        self.drafts = draw.choice([0, 1, 2, 17, MOST], MAX_NUM_SEQS).astype(np.int32)
        self.rows = draw.permutation(MAX_NUM_SEQS).astype(np.int32)
        prompt = self.rows[2]
        table.num_computed_tokens[prompt] = self.lengths[prompt] = table.num_tokens[prompt] - 1
        table.num_tokens[prompt] += 1
        table.num_pending_drafts[prompt] = self.missing[prompt] = self.drafts[prompt] = 0
        self.is_lookup = draw.random(MAX_NUM_SEQS) < 0.6
        for row, count in enumerate(self.drafts.tolist()):
            end = int(table.num_tokens[row])
            known = self.texts[row, self.lengths[row] : self.lengths[row] + count]
            table.token_ids[row, end : end + count] = PENDING_TOKEN if self.is_lookup[row] else known
        samples = self.rows != prompt
        self.plan = StepPlan(self.rows, self.drafts[self.rows] + 1, samples, self.drafts[self.rows])
        self.drafted = drafted_rows(self.plan, table)

    def begin(self, ops: Ops, lengths: LookupLengths) -> dict[str, np.ndarray]:
        """What the device has afterwards."""
        known = np.full(MAX_NUM_SEQS, -7, np.int32)
        known[self.host.num_pending_drafts > 0] = self.lengths[self.host.num_pending_drafts > 0]
        counts = self.drafts[self.rows] + 1
        ends = self.host.num_computed_tokens[self.rows] + 1
        lens = np.concatenate([end + np.arange(n) for end, n in zip(ends, counts, strict=True)])
        positions = np.concatenate(
            [end + np.arange(n) for end, n, is_one in zip(ends, counts, self.plan.sample_rows, strict=True) if is_one]
        )
        lens, positions = (np.pad(part, (0, ROOM - len(part))) for part in (lens, positions))
        tensors = [tensor(part) for part in (self.texts, known, lens, positions)]
        ops.begin_drafts(tensor(self.drafted), lengths, *tensors)
        names = ("texts", "num_tokens", "seq_lens", "positions")
        return {name: part.numpy() for name, part in zip(names, tensors, strict=True)}


@pytest.mark.parametrize("ops", OPS, ids=["torch", "triton"])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_begins_where_its_rows_really_end(seed: int, ops: Ops) -> None:
    step, lengths = Step(seed), LookupLengths(1 + seed % 2, (1 + seed) * 2)
    found = step.begin(ops, lengths)
    texts, rows = step.texts.copy(), set(step.drafted[0].tolist())
    for row in rows & set(np.flatnonzero(step.is_lookup).tolist()):
        end, count = int(step.lengths[row]), int(step.drafts[row])
        texts[row, end : end + count] = look_up(step.texts[row, :end], count, lengths)
    np.testing.assert_array_equal(found["texts"], texts)
    assert found["num_tokens"][sorted(rows)].tolist() == step.lengths[sorted(rows)].tolist()
    counts = step.drafts[step.rows] + 1
    ends = step.lengths[step.rows] + np.where(step.plan.sample_rows, 0, 1)
    lens = [end + i for end, n in zip(ends.tolist(), counts.tolist(), strict=True) for i in range(n)]
    np.testing.assert_array_equal(np.trim_zeros(found["seq_lens"]), lens)
    sampled = np.repeat(step.plan.sample_rows, counts)
    np.testing.assert_array_equal(np.trim_zeros(found["positions"]), np.array(lens)[sampled])


@pytest.mark.parametrize("ops", OPS, ids=["torch", "triton"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_accepted_is_what_the_host_would_accept(seed: int, ops: Ops) -> None:
    step, lengths = Step(seed), LookupLengths(1, 3)
    found = step.begin(ops, lengths)
    # The host, if it knew: the rows' true lengths, and their drafts.
    host = step.host
    host.num_tokens[:] = np.where(np.isin(np.arange(MAX_NUM_SEQS), step.drafted[0]), step.lengths, host.num_tokens)
    host.token_ids[:] = found["texts"]
    rows, positions = step.plan.samples(host)
    token_ids = host.token_ids[rows, positions]
    wrong = step.draw.random(len(token_ids))
    token_ids[wrong < 0.08] += 1
    token_ids[wrong < 0.03] = NO_TOKEN
    equal = num_equal_drafts(step.plan, token_ids, host)
    would_accept = num_accepted(step.plan, SampledTokens(token_ids, num_accepted_tokens=equal))
    accepted, num_tokens = torch.full((step.drafted.shape[1],), -9, dtype=torch.int32), tensor(found["num_tokens"])
    ops.accept_drafts(tensor(step.drafted), tensor(token_ids), tensor(found["texts"]), num_tokens, accepted)
    expected = dict(zip(step.plan.rows.tolist(), would_accept.tolist(), strict=True))
    drafted = step.drafted[0].tolist()
    assert accepted.tolist() == [expected[row] for row in drafted]
    assert num_tokens[drafted].tolist() == [int(step.lengths[row]) + expected[row] + 1 for row in drafted]
    assert len(set(accepted.tolist())) > 1


def test_rows_without_drafts_need_no_word() -> None:
    table = RowTable(3, 40, 4)
    plan = StepPlan(np.arange(3, dtype=np.int32), np.ones(3, np.int32), np.ones(3, np.bool_))
    assert drafted_rows(plan, table).shape == (NUM_FIELDS, 0)
    table.num_pending_drafts[1] = 2
    assert drafted_rows(plan, table)[0].tolist() == [1]
