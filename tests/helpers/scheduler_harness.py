"""A scheduler with its KV cache and rows, without an engine around it."""

from __future__ import annotations

from typing import Any

import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.memory.kv_cache import KVCacheManager
from llmbackend.engine.memory.prefix_cache import Prefix
from llmbackend.engine.messages import InferRequest
from llmbackend.engine.scheduling.scheduler import Scheduler
from llmbackend.engine.scheduling.sequence import Rows, Sequence
from llmbackend.engine.step import RowTable, StepPlan
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.mock_engine import make_request


class Harness:
    """A scheduler whose steps 'run' by counting; names in plans are request ids."""

    def __init__(self, budget: int = 16, rows: int = 4, blocks: int = 100, block_size: int = 4) -> None:
        config = EngineConfig(model="mock", block_size=block_size, num_kv_blocks=blocks, max_num_seqs=rows)
        self.runner = MockRunner(config)
        self.table = RowTable(rows, 256, block_size)
        self.kv_cache = KVCacheManager(blocks, self.table)
        self.rows = Rows(self.table, self.runner)
        self.scheduler = Scheduler(self.rows, self.kv_cache, budget)
        self.sequences: dict[str, Sequence] = {}

    def add(self, request_id: str, prompt_len: int, priority: int = 0) -> None:
        """A request whose prompt begins as no other's."""
        prompt = (100 + len(self.sequences), *range(1, prompt_len))
        self.add_request(make_request(request_id, prompt, priority, max_tokens=200))

    def add_request(self, request: InferRequest) -> None:
        sequence = Sequence(request, len(self.sequences), self.runner.info)
        self.sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def step(self) -> tuple[dict[str, int], set[str]]:
        """Chunks by request id, and the ids that sampled. The step counts as run."""
        plan = self.scheduler.schedule().plan
        return self.commit(plan) if plan is not None else ({}, set())

    def commit(self, plan: StepPlan) -> tuple[dict[str, int], set[str]]:
        names = {s.row: name for name, s in self.sequences.items() if s.row >= 0}
        chunks = {names[row]: n for row, n in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)}
        sampled = plan.rows[plan.sample_rows]
        self.table.num_computed_tokens[plan.rows] += plan.num_scheduled_tokens
        self.table.num_tokens[sampled] += 1
        self.kv_cache.check()
        return chunks, {names[row] for row in sampled.tolist()}


def counted_lookups(kv_cache: KVCacheManager, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The texts that are looked up in its prefix cache from now on."""
    texts, find = list[Any](), kv_cache._prefixes.find

    def find_noting(*text: Any) -> Prefix:
        texts.append(text)
        return find(*text)

    monkeypatch.setattr(kv_cache._prefixes, "find", find_noting)
    return texts
