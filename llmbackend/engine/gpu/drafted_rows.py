"""Rows of a step that have drafts, or had some in a step whose results the host has not read.

For: the message of a step. Does not know: how drafts are found, or accepted. Invariants: every step's
message has all that the host knows of these rows, so that a step can be repeated after one that failed; any other row
is as long as the host says.
"""

from __future__ import annotations

import numpy as np

from ..step import PENDING_TOKEN, Int32Array, RowTable, StepPlan

NUM_FIELDS = 7
"""What is told of each row."""
_NONE: Int32Array = np.empty((NUM_FIELDS, 0), np.int32)


def drafted_rows(plan: StepPlan, table: RowTable) -> Int32Array:
    """int32 [NUM_FIELDS, n], of each row:

    row
    num_tokens       before the step, as if all drafts of earlier steps were accepted
    pending_drafts   of these the most that may be missing; 0: the number is right
    first_sequence   its first sequence in the step; those of its drafts follow
    first_sample     its first sample in the step
    num_drafts
    num_lookups      of them those that the device looks up: all or none
    """
    rows, drafts, pending = plan.rows, plan.num_draft_tokens, table.num_pending_drafts[plan.rows]
    if drafts is None:
        if not pending.any():
            return _NONE
        drafts = np.zeros_like(rows)
    sequences = drafts + 1
    samples = np.where(plan.sample_rows, sequences, 0)
    num_tokens = table.num_tokens[rows]
    first_drafts = table.token_ids[rows, np.minimum(num_tokens, table.max_model_len - 1)]
    fields = (
        rows,
        num_tokens,
        pending,
        np.cumsum(sequences) - sequences,
        np.cumsum(samples) - samples,
        drafts,
        np.where(first_drafts == PENDING_TOKEN, drafts, 0),
    )
    found: Int32Array = np.stack(fields).astype(np.int32)[:, (drafts > 0) | (pending > 0)]
    return found
