"""What the runner knows of each slot: rows whose state is lost, or is that before refused drafts."""

from __future__ import annotations

import numpy as np

from llmbackend.engine.cpu.recurrent_states import SlotContents, flatten_from
from llmbackend.engine.step import Int32Array, RowTable, StepPlan, flatten


def make() -> RowTable:
    table = RowTable(3, 40, 4)
    table.token_ids[:] = np.arange(40)
    table.state_slots[:] = [2, 0, 1]
    return table


def plan(table: RowTable, row: int, count: int, drafts: int = 0) -> StepPlan:
    num_drafts = np.array([drafts], np.int32) if drafts else None
    return StepPlan(np.array([row], np.int32), np.array([count], np.int32), np.array([True]), num_drafts)


def compute(contents: SlotContents, table: RowTable, row: int, count: int, drafts: int = 0) -> tuple[int, Int32Array]:
    """The slot with which a step begins, and its tokens' positions."""
    what = plan(table, row, count, drafts)
    step = flatten(what, table)
    if (behind := contents.num_tokens_to_replay(step, table)) is not None:
        step = flatten_from(what, table, behind)
    assert contents.lost(step, table) == []
    states = contents.begin(step, table, what.num_draft_tokens)
    contents.end(step, states)
    table.num_computed_tokens[row] += count
    return int(states.sources[0]), step.positions


def test_a_row_goes_on_from_its_own_slot() -> None:
    contents, table = SlotContents(3), make()
    assert compute(contents, table, 0, 7)[0] == -1
    assert compute(contents, table, 0, 1)[0] == 2


def test_a_step_that_did_not_end_loses_its_rows_states() -> None:
    contents, table = SlotContents(3), make()
    compute(contents, table, 0, 7)
    step = flatten(plan(table, 0, 1), table)
    contents.begin(step, table)
    assert contents.lost(step, table) == [0]
    contents.end(step, contents.begin_recompute(flatten(plan(table, 1, 1), table), table))
    assert contents.lost(step, table) == [0]


def test_refused_drafts_are_taken_back() -> None:
    contents, table = SlotContents(3, 1), make()
    compute(contents, table, 0, 7)
    source, positions = compute(contents, table, 0, 4, drafts=3)
    assert source == 2
    assert positions.tolist() == [7, 8, 9, 10]
    table.num_computed_tokens[0] -= 2  # one draft was accepted: 7 and 8 hold
    source, positions = compute(contents, table, 0, 4, drafts=3)
    assert source == 3  # after 0..7
    assert positions.tolist() == [8, 9, 10, 11, 12]
    # The only slot of the runner's own was begun from, so nothing was kept before these drafts.
    table.num_computed_tokens[0] -= 3
    step = flatten(plan(table, 0, 1), table)
    assert contents.num_tokens_to_replay(step, table) is None
    assert contents.lost(step, table) == [0]


def test_accepted_drafts_need_nothing_from_before() -> None:
    contents, table = SlotContents(3, 2), make()
    compute(contents, table, 0, 7)
    compute(contents, table, 0, 4, drafts=3)
    assert compute(contents, table, 0, 1)[0] == 2


def test_a_request_s_end_frees_what_was_kept_before_its_drafts() -> None:
    contents, table = SlotContents(3, 1), make()
    for row in (0, 1, 0):
        table.num_computed_tokens[row] = 0
        compute(contents, table, row, 7)
        compute(contents, table, row, 3, drafts=2)
        contents.forget(row)
    table.num_computed_tokens[0] -= 2
    assert contents.lost(flatten(plan(table, 0, 1), table), table) == [0]
