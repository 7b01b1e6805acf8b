"""Continuous batching, one step at a time: schedule → run → commit → emit.

Driven by the loop of a process or thread, or by a benchmark; it does not know where requests come from or where outputs
go. `step()` launches steps as long as the runner accepts them, then waits for the oldest, so an accelerator computes
while the host commits, emits and schedules. Invariants: every added request gets exactly one output with a
finish_reason, and its row and blocks are free when that output is emitted; an error affects only the request that
caused it. One thread owns a core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from .adapter_loads import AdapterLoads, num_in_memory
from .config import EngineConfig
from .errors import DeviceLostError
from .grammars.constraints import Constraints
from .memory.kv_cache import KVCacheManager
from .memory.kv_events import PrefixPublishing
from .messages import EngineStats, InferRequest, ModelInfo, StepOutput, StepResult, TokenLogprobs, Vocabulary
from .reports import Watch
from .scheduling.drafting import Drafter
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Rows, Sequence, refusal
from .scheduling.step_pacing import StepPacer, StepWork
from .scheduling.step_reporter import RequestTracer, StepReporter
from .scheduling.steps_in_flight import CompletedStep, ComputingLauncher, StepsInFlight
from .step import Int32Array, OffloadingRunner, OverlappingRunner, RowTable, Runner, SampledTokens, StepPlan

logger = logging.getLogger(__name__)

_COMPILE_POLL_S = 0.002
"""How long an engine with nothing else to do waits for a grammar before it checks for messages again."""


def _overlapping_runner(config: EngineConfig, runner: Runner) -> OverlappingRunner | None:
    """The runner, if steps are launched before the tokens of the previous one are read."""
    if not config.may_overlap or not isinstance(runner, OverlappingRunner):
        return None
    return runner if config.speculative_config is None or runner.launches_drafts else None


def _offloading_runner(config: EngineConfig, runner: Runner) -> OffloadingRunner | None:
    """The runner, if it keeps KV blocks in host memory. Raises ValueError if it should but cannot."""
    if runner.info.num_host_blocks and isinstance(runner, OffloadingRunner):
        return runner
    if config.offloads_kv:
        raise ValueError(
            "engine argument 'kv_offloading_size' or 'num_host_kv_blocks' is set, expected null or 0: this model's "
            f"runner on '{runner.info.device}' does not move KV blocks to host memory (on a CPU they already are: "
            "set 'kv_cache_memory_bytes')"
        )
    return None


def _pacer(config: EngineConfig) -> StepPacer | None:
    """None if only the token budget limits a step."""
    if config.step_target_ms is None:
        return StepPacer(None) if config.device == "cpu" and config.model != "mock" else None
    return StepPacer(config.step_target_ms / 1e3) if config.step_target_ms else None


class EngineCore:
    def __init__(self, config: EngineConfig, runner: Runner, now_s: Callable[[], float] = time.monotonic) -> None:
        """now_s: a monotonic clock, in seconds."""
        self._now_s = now_s
        self.info: ModelInfo = runner.info
        self._runner = runner
        num_groups = self.info.kv_groups.count
        self._table = RowTable(config.max_num_seqs, self.info.max_model_len, self.info.block_size, num_groups)
        self._constraints = Constraints(self.info, self._table)
        self._rows = Rows(self._table, runner)
        self._offloading_runner = _offloading_runner(config, runner)
        num_host_blocks = self.info.num_host_blocks if self._offloading_runner else 0
        self._kv_cache = KVCacheManager(
            self.info.num_blocks,
            self._table,
            config.enable_prefix_caching,
            num_host_blocks,
            self.info.kv_groups,
            self.info.num_state_slots,
        )
        self._pacer = _pacer(config)
        self._scheduler = Scheduler(
            self._rows,
            self._kv_cache,
            config.max_num_batched_tokens,
            config.long_prefill_token_threshold or config.max_num_batched_tokens,
            self._pacer,
        )
        overlapping = _overlapping_runner(config, runner)
        self._in_flight = StepsInFlight(overlapping or ComputingLauncher(runner), self._rows)
        self._drafter = Drafter(config, self._rows, self._kv_cache, self._constraints, overlapping is not None)
        self._tracer = RequestTracer(self._table, now_s)
        self._is_launch_failed = False
        """Whether the rows of the next step run one by one, once nothing is in flight."""
        self._live: dict[str, Sequence] = {}
        self.adapters = AdapterLoads(runner, self._has_adapter, config.lora_modules, num_in_memory(config))
        self._ended: list[StepOutput] = []
        """Outputs of requests that ended outside a step; emitted by the next one."""
        self._arrivals = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._num_invariant_breaches = 0
        self._step_end_s = 0.0
        """When the last step was collected, by `now_s`."""
        self._reporter: StepReporter | None = None
        """None unless steps are watched."""
        self.prefixes = PrefixPublishing(self._kv_cache, config.kv_events_config)

    @property
    def has_work(self) -> bool:
        """Whether `step()` has anything to compute or emit."""
        has_work = self._live or self._ended or self._in_flight or self.adapters.has_work or self.prefixes.has_work
        return bool(has_work) or (self._reporter is not None and self._reporter.has_work)

    def watch(self, watch: Watch) -> None:
        """Sets what the results of steps report from now on."""
        if not (watch.steps or watch.blocks):
            self._reporter = None
            return
        if self._reporter is None:
            self._reporter = StepReporter(self._rows, self._scheduler, self._kv_cache, self._now_s)
        self._reporter.watch(watch)

    def add(self, request: InferRequest) -> None:
        """Queues a request. One that can never run ends at the next step with finish_reason "error" and the reason.
        Raises ValueError if a live request has the same id."""
        request_id = request.request_id
        if request_id in self._live or self.adapters.is_held(request_id):
            raise ValueError(f"request_id '{request_id}' is already running in this engine, expected a unique id")
        self._arrivals += 1
        self._add(request, self._arrivals)

    def _add(self, request: InferRequest, arrival: int) -> None:
        """arrival: its place among requests of its priority, also if it was held for its adapter."""
        request_id = request.request_id
        if self.adapters.holds(request, arrival):
            return
        if error := self.adapters.refusal(request):
            self._ended.append(StepOutput(request_id, finish_reason="error", error=error))
            return
        if error := refusal(request, self.info):
            self._ended.append(StepOutput(request_id, finish_reason="error", error=error, is_bad_input=True))
            return
        if request.served_lora_name:
            self.prefixes.name_adapter(request.lora_name, request.served_lora_name)
        sequence = Sequence(request, arrival, self.info)
        output = request.output_token_ids
        # A resumed request with nothing left to generate.
        if output and (reason := sequence.end.finish_reason(output[-1], len(request.prompt_token_ids) + len(output))):
            self._ended.append(StepOutput(request_id, (), reason, output[-1] if reason == "stop" else None))
            return
        self._prompt_tokens += len(request.prompt_token_ids)
        self._live[request_id] = sequence
        if request.is_traced:
            self._tracer.add(sequence)
        if request.grammar:
            self._tracer.happened(request_id, "compile")
            self._constraints.compile(request)
            return
        sequence.constraint = self._constraints.of(request)
        self._scheduler.add(sequence)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._constraints.set_vocabulary(vocabulary)

    def abort(self, request_id: str) -> None:
        """Ends a request in any state; its blocks are free on return. Unknown ids are ignored: such a request has
        already ended."""
        if sequence := self._live.get(request_id):
            self._end(sequence)
        if sequence or self.adapters.forget(request_id):
            self._ended.append(StepOutput(request_id, finish_reason="abort"))

    def step(self) -> StepResult:
        """Runs one step of all rows that can run, and emits requests that ended since the last one. An exception ends
        the engine."""
        if self._constraints.is_compiling:
            self._take_compiled()
        adapters = self.adapters.take_results(self._add)
        step = self._run()
        read_s = 0.0 if self._reporter is None else self._now_s()
        outputs, self._ended = self._ended, []
        times_s = (0.0, 0.0, 0.0)
        if step is not None:
            outputs += self._commit(step)
            times_s = self._times_s(step)
            if self._pacer is not None:
                self._pacer.end(times_s[0])
        elif not outputs and self._constraints.is_compiling:
            self._constraints.wait(_COMPILE_POLL_S)
        elif not outputs and not self._live and self.adapters.is_loading:
            self.adapters.wait(_COMPILE_POLL_S)
        elif not outputs and self._live:
            raise RuntimeError(f"the scheduler found nothing to run for {len(self._live)} live requests")
        self._num_steps += 1
        report = None
        if self._reporter is not None:
            compiling = self._constraints.compiling
            report = self._reporter.report(self._num_steps, step, outputs, compiling, times_s[0], read_s)
        stats = self._stats(*times_s)
        blocks = self.prefixes.take()
        return StepResult(self._num_steps, tuple(outputs), stats, adapters, self._tracer.take(), report, blocks)

    def check(self) -> None:
        """Raises AssertionError if a block or row is lost, or held without a live request."""
        self._kv_cache.check()
        self._rows.check()
        if not self._live:
            assert self._kv_cache.num_free_blocks == self.info.num_blocks, "an idle engine holds KV blocks"
            assert self._rows.num_free == self._table.max_num_seqs, "an idle engine holds rows"

    def check_idle(self) -> StepResult | None:
        """Self-check of an idle engine: logs a violation and returns a result that reports it."""
        try:
            self.check()
        except AssertionError as error:
            logger.error("an invariant of the engine is violated: %s", error)
            self._num_invariant_breaches += 1
            self._num_steps += 1
            return StepResult(self._num_steps, (), self._stats())
        return None

    def close(self) -> None:
        self._runner.close()
        self._constraints.close()
        self.adapters.close()
        self.prefixes.close()

    def _take_compiled(self) -> None:
        """Hands requests whose grammar has been compiled to the scheduler."""
        for request_id, constraint in self._constraints.take_compiled():
            sequence = self._live[request_id]
            self._tracer.happened(request_id, "compiled")
            if isinstance(constraint, str):
                self._ended.append(self._refuse(sequence, constraint))
            else:
                sequence.constraint = constraint
                self._scheduler.add(sequence)

    def _run(self) -> CompletedStep | None:
        """Launches steps, then reads the oldest one in flight; None if there is nothing to compute."""
        in_flight = self._in_flight
        while in_flight.has_room and not (self._is_launch_failed and in_flight):
            planned_s = self._now_s()
            undrafted = self._plan(bool(in_flight))
            if undrafted is None:
                break
            plan = self._with_masks(undrafted if self._is_launch_failed else self._drafter.with_drafts(undrafted))
            self._copy_blocks()
            if self._reporter is not None:
                self._reporter.begin(plan, planned_s)
            computed = self._table.num_computed_tokens[plan.rows] if self._pacer is not None else None
            if self._is_launch_failed:
                self._is_launch_failed = False
                self._begin_pacing(undrafted, computed)
                return in_flight.apply(plan, planned_s, self._execute_one_by_one(plan))
            try:
                in_flight.launch(plan, planned_s, self._drafter.guesses)
                self._begin_pacing(undrafted, computed)
            except DeviceLostError:
                raise
            except Exception:
                # The plan is dropped, but the rows it admitted and their blocks stay for the next plan.
                logger.exception("a step of %d rows failed; running its rows one by one", len(plan.rows))
                self._is_launch_failed = True
        if not in_flight:
            return None
        step = in_flight.collect()
        self._drafter.read(step)
        return step

    def _begin_pacing(self, plan: StepPlan, computed: Int32Array | None) -> None:
        """Tells the pacer what the step computes. computed: int32 [rows], tokens of each row computed before it."""
        if self._pacer is None or computed is None:
            return
        is_chunk = plan.num_scheduled_tokens > 1
        chunks = zip(computed[is_chunk].tolist(), plan.num_scheduled_tokens[is_chunk].tolist(), strict=True)
        self._pacer.begin(StepWork(int(np.count_nonzero(~is_chunk)), tuple(chunks)))

    def _copy_blocks(self) -> None:
        """Has the runner make the copies between device and host that the next step relies on. They cannot be repeated,
        so an exception ends the engine."""
        if self._offloading_runner is not None:
            for copies in self._kv_cache.host_tier.take_copies():
                self._offloading_runner.copy_blocks(copies)

    def _plan(self, in_flight: bool) -> StepPlan | None:
        schedule = self._scheduler.schedule(in_flight)
        for sequence, error in schedule.refused:
            self._ended.append(self._refuse(sequence, error))
        if schedule.plan is not None and self._tracer.is_active:
            self._tracer.planned(schedule.plan)
        return schedule.plan

    def _with_masks(self, plan: StepPlan) -> StepPlan:
        """The plan with masks for constrained rows; they are computed while the model runs."""
        constraints = self._rows.constraints
        masks = self._constraints.masks(plan, constraints) if constraints else None
        return plan if masks is None else replace(plan, masks=masks)

    def _execute_one_by_one(self, plan: StepPlan) -> SampledTokens:
        """Runs a step without drafts one row at a time, so that only the failing rows end with an error."""
        token_ids: list[int] = []
        logprobs: dict[int, Items[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        prompt_logprobs: dict[int, Items[TokenLogprobs]] = {}
        for i, row in enumerate(plan.rows.tolist()):
            part = plan.only(i)
            try:
                sampled = self._runner.execute(part, self._table)
            except DeviceLostError:
                raise
            except Exception as error:
                errors[row] = f"the engine failed on this request: {type(error).__name__}: {error}"
                token_ids += [0] * part.num_samples
                continue
            token_ids += sampled.token_ids.tolist()
            logprobs.update(sampled.logprobs)
            errors.update(sampled.errors)
            prompt_logprobs.update(sampled.prompt_logprobs)
        return SampledTokens(np.array(token_ids, np.int32), logprobs, errors, prompt_logprobs=prompt_logprobs)

    def _commit(self, step: CompletedStep) -> list[StepOutput]:
        """Ends rows that failed or finished, and registers what the others computed in the prefix cache."""
        rows, num_tokens, outputs, sampled = step.rows, step.num_computed_tokens, [], step.sampled
        errors, refusals = sampled.errors, sampled.refusals
        if errors:
            is_sound = ~np.isin(rows, list(errors))
            outputs = [self._fail(self._rows[row], errors[row]) for row in rows[~is_sound].tolist()]
            rows, num_tokens = rows[is_sound], num_tokens[is_sound]
        self._kv_cache.register(rows, num_tokens)
        if sampled.prompt_logprobs:
            outputs += self._emit_prompt_logprobs(rows, sampled.prompt_logprobs)
        live = set(rows.tolist()) if refusals else ()
        outputs += [self._refuse(self._rows[row], text) for row, text in refusals.items() if row in live]
        guesses = [0] * len(step.sampled_rows) if step.num_guesses is None else step.num_guesses.tolist()
        news = zip(step.sampled_rows, step.positions, step.new_token_ids, guesses, strict=True)
        for row, position, token_ids, num_drafts in news:
            if row not in errors and row not in refusals:
                outputs.append(self._emit(row, position, token_ids, sampled.logprobs.get(row, ()), num_drafts))
        return outputs

    def _emit_prompt_logprobs(
        self, rows: Int32Array, prompt_logprobs: Mapping[int, Items[TokenLogprobs]]
    ) -> list[StepOutput]:
        outputs = []
        for row in rows.tolist():
            if entries := prompt_logprobs.get(row):
                sequence = self._rows[row]
                self._rows.add_prompt_logprobs(row, len(entries))
                outputs.append(
                    StepOutput(
                        sequence.request.request_id,
                        num_cached_tokens=sequence.num_cached_tokens,
                        prompt_logprobs=tuple(entries),
                    )
                )
        return outputs

    def _emit(
        self, row: int, position: int, token_ids: list[int], logprobs: Items[TokenLogprobs], num_drafts: int
    ) -> StepOutput:
        """The new tokens of a row from `position` on, up to the one that ends its request, if any."""
        sequence, reason = self._rows[row], None
        if position >= sequence.max_total_tokens:  # max_tokens 0: prefill only
            self._end(sequence)
            return StepOutput(sequence.request.request_id, (), "length", num_cached_tokens=sequence.num_cached_tokens)
        for index, token_id in enumerate(token_ids):
            reason = sequence.end.finish_reason(token_id, position + index + 1)
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
            num_draft_tokens=num_drafts,
        )

    def _has_adapter(self, name: str) -> bool:
        return any(sequence.request.lora_name == name for sequence in self._live.values())

    def _fail(self, sequence: Sequence, error: str) -> StepOutput:
        """Ends a request with a row: what it computed or found in the prefix cache is no longer shared."""
        self._kv_cache.invalidate(sequence.row)
        self._end(sequence)
        return StepOutput(sequence.request.request_id, finish_reason="error", error=error)

    def _refuse(self, sequence: Sequence, error: str) -> StepOutput:
        """Ends a request that cannot run because of its own fields."""
        self._end(sequence)  # no `invalidate`: its computed blocks are valid
        return StepOutput(sequence.request.request_id, finish_reason="error", error=error, is_bad_input=True)

    def _end(self, sequence: Sequence) -> None:
        del self._live[sequence.request.request_id]
        self._drafter.forget(sequence.row)
        self._tracer.forget(sequence.request.request_id)
        self._constraints.forget(sequence.request.request_id)
        self._scheduler.remove(sequence)

    def _times_s(self, step: CompletedStep) -> tuple[float, float, float]:
        """Seconds of the step, its forward pass and its sampling. If steps overlap, a step's time starts at the end of
        the previous one, so the sum is the time in which the engine was busy."""
        now_s = self._now_s()
        began_s = max(step.planned_s, self._step_end_s)
        self._step_end_s = now_s
        return now_s - began_s, step.sampled.forward_s, step.sampled.sample_s

    def _stats(self, step_s: float = 0.0, forward_s: float = 0.0, sample_s: float = 0.0) -> EngineStats:
        host_tier = self._kv_cache.host_tier
        num_not_ready = len(self._constraints.compiling) + self.adapters.num_held
        return EngineStats(
            num_requests_running=self._scheduler.num_running,
            num_requests_waiting=self._scheduler.num_waiting + num_not_ready,
            num_blocks=self.info.num_blocks,
            num_free_blocks=self._kv_cache.num_free_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_drafts=self._drafter.num_drafts,
            num_draft_tokens=self._drafter.num_draft_tokens,
            num_accepted_tokens=self._drafter.num_accepted_tokens,
            num_steps=self._num_steps,
            last_step_s=step_s,
            last_forward_s=forward_s,
            last_sample_s=sample_s,
            num_invariant_breaches=self._num_invariant_breaches,
            num_host_blocks=host_tier.num_blocks,
            num_offloaded_blocks=host_tier.num_offloaded,
            num_reloaded_blocks=host_tier.num_reloaded,
            prefix_cache_queries=self._scheduler.num_queried_tokens,
            prefix_cache_hits=self._scheduler.num_hit_tokens,
        )
