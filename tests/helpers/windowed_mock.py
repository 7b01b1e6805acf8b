"""A mock model whose layers have windows: it fails if a query does not find the keys of its own text."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kv_groups import KVGroups
from llmbackend.engine.messages import TokenLogprobs
from llmbackend.engine.step import Int32Array, RowTable, SampledTokens, StepPlan
from llmbackend.testing.mock_model import MockRunner


class WindowedRunner(MockRunner):
    """Gives the mock model's tokens. Each slot knows the text whose key it holds."""

    def __init__(self, config: EngineConfig, groups: KVGroups) -> None:
        super().__init__(config)
        self.info = msgspec.structs.replace(self.info, kv_groups=groups)
        self._texts = np.full(self.info.num_blocks * self.info.block_size, -1, np.int64)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        spans = [
            (row, int(table.num_computed_tokens[row]), int(table.num_computed_tokens[row]) + count)
            for row, count in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)
        ]
        texts = {row: texts_of(table.token_ids[row, :end]) for row, _, end in spans}
        for row, begin, _ in spans:
            self._write(table, row, begin, texts[row])
        for row, begin, _ in spans:
            self._read(table, row, begin, texts[row], self.info.kv_groups)
        token_ids: list[int] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for row, position in zip(*(array.tolist() for array in plan.samples(table)), strict=True):
            token_id, entry = self._sample(table.token_ids[row, :position], self._requests[row], None)
            token_ids.append(token_id)
            if entry is not None:
                logprobs.setdefault(row, []).append(entry)
        return SampledTokens(np.array(token_ids, np.int32), logprobs)

    def _write(self, table: RowTable, row: int, begin: int, texts: np.ndarray) -> None:
        positions = np.arange(begin, len(texts), dtype=np.int32)
        slots = [slots_of(table, group, row, positions) for group in range(self.info.kv_groups.count)]
        assert len(np.unique(slots)) == np.size(slots), f"groups of row {row} share blocks"
        for one in slots:
            self._texts[one] = texts[begin:]

    def _read(self, table: RowTable, row: int, begin: int, texts: np.ndarray, groups: KVGroups) -> None:
        for group in range(groups.count):
            first = 0 if group < groups.num_full else max(begin - groups.window + 1, 0)
            positions = np.arange(first, len(texts), dtype=np.int32)
            found = self._texts[slots_of(table, group, row, positions)]
            assert (found == texts[first:]).all(), f"row {row} does not find its keys"


def slots_of(table: RowTable, group: int, row: int, positions: Int32Array) -> Int32Array:
    blocks = table.block_tables[group, row, positions // table.block_size]
    assert (blocks >= 0).all(), f"row {row} would read a block that was freed"
    slots: Int32Array = blocks * table.block_size + positions % table.block_size
    return slots


def texts_of(token_ids: Int32Array) -> np.ndarray:
    """A number for each position's text, int64 [tokens]."""
    numbers, value = [], 0
    for token_id in token_ids.tolist():
        value = zlib.crc32(token_id.to_bytes(4, "little"), value)
        numbers.append(value)
    return np.array(numbers, np.int64)


def windowed_core(groups: KVGroups, **arguments: Any) -> EngineCore:
    config = EngineConfig(model="mock", **arguments)
    return EngineCore(config, WindowedRunner(config, groups))
