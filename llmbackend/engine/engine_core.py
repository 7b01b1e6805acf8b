"""Continuous batching, one step at a time: schedule → run → commit → emit.

For: whoever drives an engine (a process's loop, a thread, a benchmark). Does not know: where requests come from, or
where outputs go. Invariants: every request that was added gets exactly one output with a finish_reason, and its row and
blocks are free when that output is emitted; an error belongs to the request that caused it. One thread owns a core.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from .config import EngineConfig
from .fault_injection import Faults, FaultyRunner
from .infer_request import EngineStats, FinishReason, InferRequest, ModelInfo, StepOutput, StepResult, TokenLogprobs
from .kv_cache import KVCacheManager
from .scheduler import Scheduler
from .sequence import Rows, Sequence, refusal
from .step import RowTable, Runner, SampledTokens, StepPlan

logger = logging.getLogger(__name__)


def make_runner(config: EngineConfig) -> Runner:
    """The model that `config` names. Raises ValueError, OSError or RuntimeError with a text for the user."""
    runner = _make_sound_runner(config)
    return FaultyRunner(runner, Faults(config.fault_directory)) if config.fault_directory else runner


def _make_sound_runner(config: EngineConfig) -> Runner:
    if config.model == "mock":
        from .mock_model import MockRunner

        return MockRunner(config)
    from .model_runner import ModelRunner

    return ModelRunner(config)


class EngineCore:
    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.info: ModelInfo = runner.info
        self._runner = runner
        self._table = RowTable(config.max_num_seqs, self.info.max_model_len, self.info.block_size)
        self._rows = Rows(self._table, runner)
        self._kv_cache = KVCacheManager(self.info.num_blocks, self._table)
        self._scheduler = Scheduler(self._rows, self._kv_cache, config.max_num_batched_tokens)
        self._live: dict[str, Sequence] = {}
        self._ended: list[StepOutput] = []
        """Outputs of requests that ended outside a step; the next step emits them."""
        self._arrivals = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._num_invariant_breaches = 0

    @property
    def has_work(self) -> bool:
        """Whether `step()` has anything to do or to tell."""
        return bool(self._live or self._ended)

    def add(self, request: InferRequest) -> None:
        """Queues a request. One that can never run ends at the next step with finish_reason "error" and the reason."""
        request_id = request.request_id
        if request_id in self._live:
            raise ValueError(f"request_id '{request_id}' is already live in this engine, expected a unique id")
        if error := refusal(request, self.info):
            self._ended.append(StepOutput(request_id, finish_reason="error", error=error))
            return
        sequence = Sequence(request, self._arrivals, self.info)
        self._arrivals += 1
        output = request.output_token_ids
        if output and (reason := sequence.finish_reason(output[-1], len(request.prompt_token_ids) + len(output))):
            self._ended.append(self._last_output(sequence, reason, output[-1]))
            return
        self._prompt_tokens += len(request.prompt_token_ids)
        self._live[request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request in any state; its blocks are free on return. An unknown id is one that has ended already."""
        if sequence := self._live.get(request_id):
            self._end(sequence)
            self._ended.append(StepOutput(request_id, finish_reason="abort"))

    def step(self) -> StepResult:
        """One step of all that can run; also emits what ended since the last one."""
        start_s = time.monotonic()
        schedule = self._scheduler.schedule()
        for sequence, error in schedule.refused:
            self._ended.append(self._fail(sequence, error))
        outputs, self._ended = self._ended, []
        if schedule.plan is not None:
            outputs += self._commit(schedule.plan, self._run(schedule.plan))
        elif not outputs and self._live:
            raise RuntimeError(f"the scheduler found nothing to run for {len(self._live)} live requests")
        self._num_steps += 1
        return StepResult(self._num_steps, tuple(outputs), self._stats(time.monotonic() - start_s))

    def check(self) -> None:
        """Raises AssertionError when a block or a row is lost, or held by nobody alive."""
        self._kv_cache.check()
        self._rows.check()
        if not self._live:
            assert self._kv_cache.num_free_blocks == self.info.num_blocks, "an idle engine holds KV blocks"
            assert self._rows.num_free == self._table.max_num_seqs, "an idle engine holds rows"

    def check_idle(self) -> StepResult | None:
        """The self-check of an engine that has nothing to do: logs a breach, and reports it in a result of its own."""
        try:
            self.check()
        except AssertionError as error:
            logger.error("an invariant of the engine is broken: %s", error)
            self._num_invariant_breaches += 1
            self._num_steps += 1
            return StepResult(self._num_steps, (), self._stats(0.0))
        return None

    def close(self) -> None:
        self._runner.close()

    def _run(self, plan: StepPlan) -> SampledTokens:
        try:
            return self._runner.execute(plan, self._table)
        except Exception:
            logger.exception("a step of %d rows failed; running its rows one by one", len(plan.rows))
        return self._run_one_by_one(plan)

    def _run_one_by_one(self, plan: StepPlan) -> SampledTokens:
        """The same step, a row at a time: rows that fail alone get their own error, the others go on."""
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        errors: dict[int, str] = {}
        for i, row in enumerate(plan.rows.tolist()):
            part = StepPlan(plan.rows[i : i + 1], plan.num_scheduled_tokens[i : i + 1], plan.sample_rows[i : i + 1])
            try:
                sampled = self._runner.execute(part, self._table)
            except Exception as error:
                errors[row] = f"the engine failed on this request: {type(error).__name__}: {error}"
                token_ids += [0] * int(plan.sample_rows[i])
                continue
            token_ids += sampled.token_ids.tolist()
            logprobs.update(sampled.logprobs)
            errors.update(sampled.errors)
        return SampledTokens(np.array(token_ids, np.int32), logprobs, errors)

    def _commit(self, plan: StepPlan, sampled: SampledTokens) -> list[StepOutput]:
        """Writes what the step computed into the rows, and ends the requests that are over."""
        table, rows = self._table, plan.rows[plan.sample_rows]
        table.num_computed_tokens[plan.rows] += plan.num_scheduled_tokens
        table.token_ids[rows, table.num_tokens[rows]] = sampled.token_ids
        table.num_tokens[rows] += 1
        outputs = [self._fail(self._rows[row], error) for row, error in sampled.errors.items()]
        for row, token_id, num_tokens in zip(
            rows.tolist(), sampled.token_ids.tolist(), table.num_tokens[rows].tolist(), strict=True
        ):
            if row not in sampled.errors:
                outputs.append(self._emit(self._rows[row], token_id, num_tokens, sampled.logprobs.get(row)))
        return outputs

    def _emit(self, sequence: Sequence, token_id: int, num_tokens: int, logprobs: TokenLogprobs | None) -> StepOutput:
        self._generation_tokens += 1
        reason = sequence.finish_reason(token_id, num_tokens)
        if reason is not None:
            self._end(sequence)
        return StepOutput(
            sequence.request.request_id,
            (token_id,),
            reason,
            token_id if reason == "stop" else None,
            (logprobs,) if logprobs is not None else (),
        )

    def _last_output(self, sequence: Sequence, reason: FinishReason, token_id: int) -> StepOutput:
        """The end of a request that was resumed with nothing left to generate."""
        return StepOutput(sequence.request.request_id, (), reason, token_id if reason == "stop" else None)

    def _fail(self, sequence: Sequence, error: str) -> StepOutput:
        self._end(sequence)
        return StepOutput(sequence.request.request_id, finish_reason="error", error=error)

    def _end(self, sequence: Sequence) -> None:
        del self._live[sequence.request.request_id]
        self._scheduler.remove(sequence)

    def _stats(self, step_s: float) -> EngineStats:
        return EngineStats(
            num_requests_running=self._scheduler.num_running,
            num_requests_waiting=self._scheduler.num_waiting,
            num_blocks=self.info.num_blocks,
            num_free_blocks=self._kv_cache.num_free_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self._num_steps,
            last_step_s=step_s,
            num_invariant_breaches=self._num_invariant_breaches,
        )
