"""Continuous batching, one step at a time: schedule → run → commit → emit.

For: whoever drives an engine (a process's loop, a thread, a benchmark). Does not know: where requests come from, or
where outputs go. Invariants: every request that was added gets exactly one output with a finish_reason, and its row and
blocks are free when that output is emitted; an error belongs to the request that caused it. One thread owns a core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items

import numpy as np

from .config import EngineConfig
from .fault_injection import Faults, FaultyRunner
from .infer_request import EngineStats, FinishReason, InferRequest, ModelInfo, StepOutput, StepResult, TokenLogprobs
from .kv_cache import KVCacheManager
from .process import lean_imports
from .scheduler import Scheduler
from .sequence import Rows, Sequence, refusal
from .speculation import Speculator, runs_that_hold
from .step import Int32Array, RowTable, Runner, SampledTokens, StepPlan

logger = logging.getLogger(__name__)


def make_runner(config: EngineConfig) -> Runner:
    """The model that `config` names. Raises ValueError, OSError or RuntimeError with a text for the user."""
    runner = _make_sound_runner(config)
    return FaultyRunner(runner, Faults(config.fault_directory)) if config.fault_directory else runner


def _make_sound_runner(config: EngineConfig) -> Runner:
    if config.model == "mock":
        from .mock.mock_model import MockRunner

        return MockRunner(config)
    if config.device != "cpu" or config.transport != "process":
        return _model_runner(config)
    try:
        with lean_imports.without_compiler():  # for the whole process, which is the engine's own
            return _model_runner(config)
    except (AttributeError, ImportError):
        logger.warning("loading without torch's compiler failed; loading with it", exc_info=True)
    return _model_runner(config)


def _model_runner(config: EngineConfig) -> Runner:
    from .model_runner import ModelRunner

    return ModelRunner(config)


class EngineCore:
    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.info: ModelInfo = runner.info
        self._runner = runner
        self._table = RowTable(config.max_num_seqs, self.info.max_model_len, self.info.block_size)
        self._rows = Rows(self._table, runner)
        self._kv_cache = KVCacheManager(self.info.num_blocks, self._table, config.enable_prefix_caching)
        self._scheduler = Scheduler(self._rows, self._kv_cache, config.max_num_batched_tokens)
        speculation = config.speculative_config
        self._speculator = Speculator(speculation, self._table) if speculation else None
        self._max_draft_step_tokens = min(
            config.max_num_batched_tokens, speculation.max_step_tokens if speculation else 0
        )
        self._live: dict[str, Sequence] = {}
        self._ended: list[StepOutput] = []
        """Outputs of requests that ended outside a step; the next step emits them."""
        self._arrivals = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._num_invariant_breaches = 0
        self._compute_s = 0.0, 0.0
        """What the last step's forward pass and its sampling took."""

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
        start_s, self._compute_s = time.monotonic(), (0.0, 0.0)
        schedule = self._scheduler.schedule()
        for sequence, error in schedule.refused:
            self._ended.append(self._fail(sequence, error))
        outputs, self._ended = self._ended, []
        if schedule.plan is not None:
            plan = self._with_drafts(schedule.plan)
            sampled = self._run(plan)
            outputs += self._commit(plan, sampled)
            self._compute_s = sampled.forward_s, sampled.sample_s
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

    def _with_drafts(self, plan: StepPlan) -> StepPlan:
        """The plan with guesses of what its rows will sample, if there are any that free blocks have room for."""
        if self._speculator is None or len(plan.rows) >= self._max_draft_step_tokens:
            return plan
        room = self._max_draft_step_tokens - plan.num_tokens
        limits = [self._rows[row].max_total_tokens for row in plan.rows.tolist()]
        drafts = self._speculator.draft(plan, limits, room) if room > 0 else None
        if drafts is None:
            return plan
        scheduled = plan.num_scheduled_tokens + drafts
        if not self._kv_cache.reserve(plan.rows, self._table.num_computed_tokens[plan.rows] + scheduled):
            return plan
        self._num_drafts += int(np.count_nonzero(drafts))
        self._num_draft_tokens += int(drafts.sum())
        return StepPlan(plan.rows, scheduled, plan.sample_rows, drafts)

    def _run(self, plan: StepPlan) -> SampledTokens:
        try:
            return self._runner.execute(plan, self._table)
        except Exception:
            logger.exception("a step of %d rows failed; running its rows one by one", len(plan.rows))
        return self._run_one_by_one(plan)

    def _run_one_by_one(self, plan: StepPlan) -> SampledTokens:
        """The same step, a row at a time: rows that fail alone get their own error, the others go on."""
        token_ids: list[int] = []
        logprobs: dict[int, Items[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        for i, row in enumerate(plan.rows.tolist()):
            part = plan.only(i)
            try:
                sampled = self._runner.execute(part, self._table)
            except Exception as error:
                errors[row] = f"the engine failed on this request: {type(error).__name__}: {error}"
                token_ids += [0] * part.num_samples
                continue
            token_ids += sampled.token_ids.tolist()
            logprobs.update(sampled.logprobs)
            errors.update(sampled.errors)
        return SampledTokens(np.array(token_ids, np.int32), logprobs, errors)

    def _commit(self, plan: StepPlan, sampled: SampledTokens) -> list[StepOutput]:
        """Writes what the step computed into the rows, and ends the requests that are over."""
        rows, starts, counts = self._write(plan, sampled.token_ids)
        outputs = [self._fail(self._rows[row], error) for row, error in sampled.errors.items()]
        self._scheduler.computed(np.setdiff1d(plan.rows, list(sampled.errors)) if sampled.errors else plan.rows)
        token_ids = sampled.token_ids.tolist()
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            if row not in sampled.errors:
                outputs.append(self._emit(row, token_ids[start : start + count], sampled.logprobs.get(row, ())))
        return outputs

    def _write(self, plan: StepPlan, token_ids: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Moves the rows on. Returns the sampled rows, and where in token_ids the new tokens of each start and how
        many they are."""
        if len(token_ids) != plan.num_samples:
            raise RuntimeError(f"the runner sampled {len(token_ids)} tokens, the plan asked for {plan.num_samples}")
        table, rows = self._table, plan.rows[plan.sample_rows]
        starts, counts = runs_that_hold(plan, token_ids, table)
        table.num_computed_tokens[plan.rows] += plan.num_scheduled_tokens
        table.num_tokens[rows] += counts
        # Drafts that held are there already.
        table.token_ids[rows, table.num_tokens[rows] - 1] = token_ids[starts + counts - 1]
        if plan.num_draft_tokens is not None and self._speculator is not None:
            table.num_computed_tokens[rows] = table.num_tokens[rows] - 1
            self._num_accepted_tokens += int(counts.sum()) - len(rows)
            self._speculator.learn(rows, plan.num_draft_tokens[plan.sample_rows], counts - 1)
        return rows, starts, counts

    def _emit(self, row: int, token_ids: list[int], logprobs: Items[TokenLogprobs]) -> StepOutput:
        """The new tokens of a row up to the one that ends its request, if any does."""
        sequence, reason = self._rows[row], None
        first = int(self._table.num_tokens[row]) - len(token_ids) + 1
        for index, token_id in enumerate(token_ids):
            reason = sequence.finish_reason(token_id, first + index)
            if reason is not None:
                token_ids = token_ids[: index + 1]
                self._end(sequence)
                break
        self._generation_tokens += len(token_ids)
        return StepOutput(
            sequence.request.request_id,
            tuple(token_ids),
            reason,
            token_ids[-1] if reason == "stop" else None,
            tuple(logprobs[: len(token_ids)]),
            sequence.num_cached_tokens,
        )

    def _last_output(self, sequence: Sequence, reason: FinishReason, token_id: int) -> StepOutput:
        """The end of a request that was resumed with nothing left to generate."""
        return StepOutput(sequence.request.request_id, (), reason, token_id if reason == "stop" else None)

    def _fail(self, sequence: Sequence, error: str) -> StepOutput:
        self._scheduler.distrust(sequence)
        self._end(sequence)
        return StepOutput(sequence.request.request_id, finish_reason="error", error=error)

    def _end(self, sequence: Sequence) -> None:
        del self._live[sequence.request.request_id]
        if self._speculator is not None:
            self._speculator.forget(sequence.row)
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
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_steps=self._num_steps,
            last_step_s=step_s,
            last_forward_s=self._compute_s[0],
            last_sample_s=self._compute_s[1],
            num_invariant_breaches=self._num_invariant_breaches,
            prefix_cache_queries=self._scheduler.num_queried_tokens,
            prefix_cache_hits=self._scheduler.num_hit_tokens,
        )
