"""One row's part of a plan, as it is run after a step that failed."""

from __future__ import annotations

import numpy as np
import pytest

from llmbackend.engine.step import StepPlan
from llmbackend.engine.token_masks import TokenMasks


@pytest.mark.parametrize(("index", "masks"), [(0, [5]), (1, []), (2, [-1])])
def test_a_row_gets_the_masks_of_its_own_sample(index: int, masks: list[int]) -> None:
    """Row 1 does not sample, because its prompt goes on."""
    plan = StepPlan(
        rows=np.array([7, 8, 9], np.int32),
        num_scheduled_tokens=np.array([1, 4, 3], np.int32),
        sample_rows=np.array([True, False, True]),
        masks=TokenMasks(np.array([5, -1], np.int32), np.zeros((6, 1), np.uint32)),
    )
    part = plan.only(index)
    assert part.rows.tolist() == [7 + index] and part.num_samples == len(masks)
    assert part.masks is not None and part.masks.result().index.tolist() == masks
