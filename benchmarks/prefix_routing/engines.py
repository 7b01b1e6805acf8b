"""Real engine cores with real prefix caches on the mock model, in virtual time.

For the comparison of policies. Independent of who chooses an engine. Invariant: a step's results become visible when
its duration is over, as with a device; the duration follows from what it computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, StepResult
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from llmbackend.testing.mock_model import MockRunner

from .virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """step_s: of each step; prompt_token_s: of each token of a prompt in it."""

    num_kv_blocks: int = 1024
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    max_model_len: int = 8192
    step_s: float = 0.02
    prompt_token_s: float = 1e-4

    def times(self, count: int) -> EngineSettings:
        """One engine that is as many in one."""
        return EngineSettings(
            self.num_kv_blocks * count,
            self.block_size,
            self.max_num_seqs * count,
            self.max_num_batched_tokens * count,
            self.max_model_len,
            self.step_s,
            self.prompt_token_s / count,
        )


class _CountingRunner(MockRunner):
    num_tokens = 0

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        self.num_tokens = plan.num_tokens - len(plan.rows)
        return super().execute(plan, table)


class VirtualEngine:
    def __init__(
        self,
        settings: EngineSettings,
        clock: VirtualTime,
        before_step: Callable[[VirtualEngine], Sequence[InferRequest]],
        after_step: Callable[[VirtualEngine, StepResult], None],
    ) -> None:
        """before_step: requests that it takes now. after_step: sees the results."""
        config = EngineConfig(
            model="mock",
            num_kv_blocks=settings.num_kv_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
        )
        self._settings = settings
        self._clock = clock
        self._runner = _CountingRunner(config)
        self.core = EngineCore(config, self._runner, lambda: clock.now_s)
        self._before_step = before_step
        self._after_step = after_step
        self._is_stepping = False
        self.num_live = 0

    def room(self) -> int:
        return self._settings.max_num_seqs - self.num_live

    def add(self, request: InferRequest) -> None:
        self.core.add(request)
        self.num_live += 1
        self.wake()

    def wake(self) -> None:
        """There may be something to do."""
        if self._is_stepping:
            return
        self._is_stepping = True
        for request in self._before_step(self):
            self.core.add(request)
            self.num_live += 1
        if not self.core.has_work:
            self._is_stepping = False
            return
        self._runner.num_tokens = 0
        result = self.core.step()
        duration_s = self._settings.step_s + self._runner.num_tokens * self._settings.prompt_token_s
        self._clock.after(duration_s, lambda: self._end_step(result))

    def _end_step(self, result: StepResult) -> None:
        self._is_stepping = False
        self.num_live -= sum(output.finish_reason is not None for output in result.outputs)
        self._after_step(self, result)
        self.wake()
