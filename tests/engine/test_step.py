"""The flat form of a step: one row's part of a plan with drafts, as it is run after a step that failed."""

from __future__ import annotations

import numpy as np
import pytest

from llmbackend.engine.step import RowTable, StepPlan, flatten


@pytest.mark.parametrize("index, sampled", [(0, []), (1, [0, 1, 2])])
def test_a_row_whose_prompt_goes_on_samples_nothing_beside_rows_with_drafts(index: int, sampled: list[int]) -> None:
    table = RowTable(max_num_seqs=2, max_model_len=16, block_size=4)
    plan = StepPlan(
        rows=np.array([0, 1], np.int32),
        num_scheduled_tokens=np.array([4, 3], np.int32),
        sample_rows=np.array([False, True]),
        num_draft_tokens=np.array([0, 2], np.int32),
    )
    assert flatten(plan.only(index), table).sampled_tokens.tolist() == sampled
