"""A step's sequences on the device: each row's known tokens are one, and each of its drafts is one of its own.

For: the messages to the device, the sizes of steps. Does not know: where drafts come from, memory, graphs.
Invariants: the sequences' tokens are the plan's, in its order. A draft's sequence has one query and shares its row's
blocks: every layer writes the step's keys before it attends, so the draft sees those before it, and is computed by the
kernels and in the graphs that would decode it in a step of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config import EngineConfig
from ..step import BoolArray, Int32Array, RowTable, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepSequences:
    """Arrays over the sequences of a step.

    rows        int32 [n]  several times in a row for one that has drafts
    query_lens  int32 [n]  tokens that the step computes
    seq_lens    int32 [n]  tokens that have KV after the step; also the position of the token that is sampled
    samples     bool  [n]
    """

    rows: Int32Array
    query_lens: Int32Array
    seq_lens: Int32Array
    samples: BoolArray

    @classmethod
    def of(cls, plan: StepPlan, table: RowTable) -> StepSequences:
        rows, query_lens, drafts = plan.rows, plan.num_scheduled_tokens, plan.num_draft_tokens
        seq_lens = table.num_computed_tokens[rows] + query_lens
        if drafts is None:
            return cls(rows, query_lens, seq_lens, plan.sample_rows)
        ends = np.cumsum(drafts + 1, dtype=np.int32)
        starts = ends - drafts - 1
        index = np.repeat(np.arange(len(rows)), drafts + 1)
        expanded_lens = np.ones(len(index), np.int32)
        expanded_lens[starts] = query_lens - drafts
        places: Int32Array = np.arange(len(index), dtype=np.int32) - starts[index]
        return cls(rows[index], expanded_lens, (seq_lens - drafts)[index] + places, plan.sample_rows[index])


def num_sequences(plan: StepPlan) -> int:
    return len(plan.rows) + (0 if plan.num_draft_tokens is None else int(plan.num_draft_tokens.sum()))


def max_sequences(config: EngineConfig) -> int:
    """Of any step; also the most that it samples."""
    return max(config.max_num_seqs, config.max_step_samples) if config.may_draft else config.max_num_seqs
