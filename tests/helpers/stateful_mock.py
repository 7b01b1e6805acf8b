"""A mock model with windows and recurrent layers: it fails if a row does not find its own keys or its own state.

No family of transformers has both, so this stands in for one. Slots are kept as the native runner keeps them.
"""

from __future__ import annotations

import zlib

import msgspec
import numpy as np

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.recurrent_operations import StepStates
from llmbackend.engine.cpu.recurrent_states import SlotContents, flatten_from, groups_with_draft_replay, part_of_row
from llmbackend.engine.kv_groups import KVGroups
from llmbackend.engine.step import FlatStep, Int32Array, RowTable, SampledTokens, StepPlan, flatten
from llmbackend.testing.mock_model import MockRunner

from .windowed_mock import WindowedRunner, texts_of

GROUPS = KVGroups(1, 1, 5)
KEPT = 3
"""Slots for prefixes, beside those for rows."""


class StatefulRunner(WindowedRunner):
    """A slot's state is the number of the text after which it stands."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, groups_with_draft_replay(GROUPS, config))
        num_slots, num_backups = config.max_num_seqs + KEPT, config.max_speculative_step_tokens
        self.info = msgspec.structs.replace(self.info, num_state_slots=num_slots)
        self._contents = SlotContents(num_slots, num_backups)
        self._states = np.full(num_slots + num_backups, -1, np.int64)

    def remove_row(self, row: int) -> None:
        super().remove_row(row)
        self._contents.forget(row)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        step = flatten(plan, table)
        if (behind := self._contents.num_tokens_to_replay(step, table)) is not None:
            step = flatten_from(plan, table, behind)
        for row in self._contents.lost(step, table):
            computed = int(table.num_computed_tokens[row])
            again = part_of_row(table, row, 0, computed)
            self._run(again, table, self._contents.begin_recompute(again, table))
        self._run(step, table, self._contents.begin(step, table, plan.num_draft_tokens))
        return MockRunner.execute(self, plan, table)

    def _run(self, step: FlatStep, table: RowTable, states: StepStates) -> None:
        for index, row in enumerate(step.rows.tolist()):
            end, begin = int(step.seq_lens[index]), int(step.seq_lens[index] - step.query_lens[index])
            texts = texts_of(table.token_ids[row, :end])
            self._write(table, row, begin, texts)
            self._read(table, row, begin, texts, GROUPS)
            self._advance(step, index, states)
            assert self._states[states.slots[index]] == texts[-1], f"row {row} has another text's state"
        self._contents.end(step, states)

    def _advance(self, step: FlatStep, index: int, states: StepStates) -> None:
        source = int(states.sources[index])
        value = 0 if source < 0 else int(self._states[source])
        tokens: Int32Array = np.arange(step.query_start[index], step.query_start[index + 1], dtype=np.int32)
        for token in tokens.tolist():
            value = zlib.crc32(int(step.token_ids[token]).to_bytes(4, "little"), value)
            if states.copies[token] >= 0:
                self._states[states.copies[token]] = value
        self._states[states.slots[index]] = value
