"""ModelInstanceState: one instance of a model. Queues Execute's requests, and handles its engine's callbacks.

Used by backend.py and the loop of the instance's LlmManager. Independent of the queue's internals and of deadlines.
Invariants: when `enqueue` returns, every request is queued, about to be queued, or answered and released; callbacks run
only on the engine's loop, and failing to deliver one task's output does not affect others. Name and role are MindIE's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from llmbackend.core.activity.messages import InstanceDescription
from llmbackend.core.backend_api import (
    ErrorCode,
    MemoryType,
    MemoryUsage,
    ModelInstance,
    Request,
    ResponseFlag,
    TritonError,
    internal,
    invalid_argument,
    process_memory,
    responses_together,
    unavailable,
)
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.llm_manager import LlmManager, ManagerCallbacks, Operation
from llmbackend.engine.messages import EngineStats, InferRequest, RequestEvent, StepOutput
from llmbackend.engine.reports import Watch

from .activity import NO_ENGINE, InstanceReports
from .lora import LoraChange, lora_change
from .metrics import REFUSED
from .model_state import ModelState
from .requests.conversion_pool import is_short
from .schemas.schema import is_stop
from .tasks.infer_task import InferTask
from .tasks.task_map import NO_CONTROLS

logger = logging.getLogger(__name__)


class StepTimes:
    """When the outputs of one step arrived, and the latencies that they complete."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.first_token_s: list[float] = []
        """Time from a request's arrival to its first token."""
        self.inter_token_s: list[float] = []
        """Time between two outputs of a request."""


class ModelInstanceState:
    """Owner of the instance's engine."""

    def __init__(self, model_state: ModelState, instance: ModelInstance) -> None:
        """Starts the instance's engine and returns when its model is loaded. Raises TritonError if that fails."""
        self._model = model_state
        self._instance = instance
        self._tasks = model_state.tasks
        self._metrics = model_state.metrics
        self._reports = InstanceReports(instance.activity, model_state.tasks)
        self._engine = model_state.new_engine(instance, self._make_manager)
        model_state.start_engine(self._engine, instance.name)

    def _make_manager(self, config: EngineConfig, index: int) -> LlmManager:
        callbacks = ManagerCallbacks(
            get_requests=self._get_requests,
            send_responses=self._send_responses,
            control_signal=self._control_signal,
            stats=self._on_stats,
            status_response=self._on_refused,
            engine_lost=self._engine_lost,
            vocabulary=self._model.vocabulary,
            adapters=self._model.loras.wanted,
            adapter_loaded=lambda result: self._model.loras.loaded(self._engine.index, result),
            request_events=self._on_request_events,
            reported=self._reports.engine_report,
            state_changed=self._reports.engine_state,
            progress=self._reports.load_progress,
            blocks_changed=lambda changes: self._model.prefixes.changed(self._engine, changes),
            needs_engine=self._model.needs_engine,
        )
        stall_timeout_s, policy = self._model.arguments.stall_timeout_s, self._instance.host_policy
        return LlmManager(config, callbacks, stall_timeout_s=stall_timeout_s, index=index, policy=policy)

    def check_ready(self) -> None:
        """Raises TritonError UNAVAILABLE with the reason if the engine is not ready."""
        try:
            self._engine.manager.check_ready()
        except RuntimeError as error:
            raise unavailable(str(error)) from error

    def kill_engine(self) -> int:
        """Kills the engine's process and returns its id; its requests continue in another engine. Raises TritonError
        UNAVAILABLE if there is no process."""
        pid = self._engine.manager.kill_engine()
        if not pid:
            raise unavailable(f"instance '{self._instance.name}' has no engine process with a loaded model")
        return pid

    def watch(self, kinds: frozenset[str]) -> None:
        """Sets what the engine reports from now on. Thread-safe."""
        self._engine.manager.watch(Watch(steps="steps" in kinds, blocks="blocks" in kinds))

    def describe(self) -> InstanceDescription:
        """Describes the instance's present state for watching clients. Thread-safe."""
        engine = self._engine
        return self._reports.describe(engine.manager.state, engine.config, engine.info)

    def memory_usage(self) -> Sequence[MemoryUsage]:
        """The engine's current memory usage. The resident memory of an engine on another machine, or on a thread of
        this process, is unknown. Thread-safe."""
        engine = self._engine
        pid, info = engine.manager.state.pid, engine.info
        usage = process_memory(pid) if pid else []
        is_cpu = info.device == "cpu"
        device_id = int(info.device.partition(":")[2] or 0)
        parts = (
            (MemoryType.GPU, info.device_bytes),
            (MemoryType.CPU_WEIGHTS if is_cpu else MemoryType.GPU_WEIGHTS, info.held_weight_bytes),
            (MemoryType.CPU_KV_CACHE if is_cpu else MemoryType.GPU_KV_CACHE, info.kv_bytes),
        )
        return usage + [MemoryUsage(kind, device_id, num_bytes) for kind, num_bytes in parts if num_bytes]

    def shutdown(self) -> None:
        self._model.stop_engine(self._engine)

    # --- requests in, on the instance's thread ------------------------------------------------------------------------

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Takes ownership of `requests`. Those that cannot be served are answered with an error."""
        for request in requests:
            if is_stop(request):
                self._handle_stop_request(request)
                continue
            if (change := lora_change(request)) is not None:
                self._change_loras(request, change, time.monotonic_ns())
                continue
            convert = partial(self._convert, request, time.monotonic_ns())
            if is_short(request):
                if tasks := convert():
                    self._model.submit(tasks)
            else:
                self._model.convert_later(request, convert, partial(self._refuse, request))

    def _convert(self, request: Request, exec_start_ns: int) -> Sequence[InferTask]:
        """The request's tasks; none if it cannot be served and has been answered."""
        converter = self._model.converter
        try:
            if converter is None:
                raise unavailable("no engine is running")
            return converter.convert(request, self._instance, exec_start_ns)
        except TritonError as error:
            self._refuse(request, error)
        except Exception as error:
            logger.exception("a request could not be converted")
            self._refuse(request, internal(f"the request could not be converted: {error}"))
        return ()

    def _handle_stop_request(self, request: Request) -> None:
        """Ends the requests of the same client with this id. Its own response is empty. Source: TensorRT-LLM's
        handleStopRequest."""
        if not request.id:
            self._refuse(request, internal("Trying to stop a request but request ID is not provided"))
            return
        self._model.stop_requests(request.id, request.tenant)
        self._answer(request, time.monotonic_ns())

    def _change_loras(self, request: Request, change: LoraChange, start_ns: int) -> None:
        """Answered once the engines have loaded the adapter, or at the deadline."""

        def answer(error: TritonError | None) -> None:
            self._answer(request, start_ns, error)

        try:
            self._model.change_loras(change, answer)
        except TritonError as error:
            answer(error)
        except Exception as error:
            logger.exception("a LoRA adapter could not be loaded")
            answer(internal(f"the adapter could not be loaded: {error}"))

    def _refuse(self, request: Request, error: TritonError) -> None:
        self._answer(request, 0, self._model.schema.client_error(error))

    def _answer(self, request: Request, start_ns: int, error: TritonError | None = None) -> None:
        """Ends a request for which no task is created. start_ns: ignored if there is an error"""
        request.new_response().send(ResponseFlag.FINAL, error)
        self._instance.report_statistics(request, error is None, start_ns, start_ns, start_ns, time.monotonic_ns())
        request.release()

    # --- callbacks, on the engine's loop ------------------------------------------------------------------------------

    def _get_requests(self, room: int) -> Sequence[InferRequest]:
        """Up to `room` requests in queue order, except those that wait for another engine; none for an engine that is
        not ready while another one is."""
        if not self._tasks.num_queued:
            return ()
        ready = self._model.ready_engines()
        if ready and self._engine not in ready:
            return ()
        now_ns, assignment = time.monotonic_ns(), self._engine.assignment
        tasks = self._tasks.take(assignment, room, [engine.assignment for engine in ready], now_ns)
        if assignment.look_again_ns:
            self._model.wake_later(self._engine, assignment.look_again_ns)
        for task in tasks:
            if not task.times.taken_ns:
                self._metrics.taken_by_engine(task, now_ns)
            task.times.taken_ns = task.times.taken_ns or now_ns
        self._reports.taken(tasks)
        return [request for task in tasks if (request := self._resumed(task)) is not None]

    def _resumed(self, task: InferTask) -> InferRequest | None:
        """The task's request for the engine; None if it cannot be created and the task has been answered."""
        try:
            return task.resume_request()
        except Exception as error:
            logger.exception("request %s: it could not be sent to an engine", task.request_id)
            self._tasks.pop(task.request_id)
            self._model.fail(task, internal(f"the request could not be sent to an engine: {error}"))
            return None

    def _send_responses(self, outputs: Sequence[StepOutput]) -> None:
        step = StepTimes(time.monotonic_ns())
        self._tasks.record_outputs(self._engine.assignment, outputs)
        with responses_together():
            for output in outputs:
                task = self._tasks.get(output.request_id)
                if task is None:
                    continue  # cancelled or stopped during the step
                try:
                    self._handle_output(task, output, step)
                except Exception as error:
                    logger.exception("request %s: its output could not be delivered", output.request_id)
                    self._remove(task, output)
                    self._model.fail(task, internal(f"the response could not be built: {error}"))
        self._metrics.outputs(step.first_token_s, step.inter_token_s)

    def _control_signal(self) -> Sequence[tuple[str, Operation]]:
        """Answers stopped requests, and returns those that this engine must drop."""
        controls = self._tasks.take_controls(self._engine.assignment)
        if controls is NO_CONTROLS:
            return ()
        for task, error in controls.ended:
            self._end_stopped(task, error)
        for assignment in controls.elsewhere:
            assignment.wake()
        if controls.ended:
            self._model.update_waiting_gauge()
        return [(request_id, Operation.STOP) for request_id in controls.stop]

    def _engine_lost(self, request_ids: Sequence[str], cause: EngineDeadError) -> None:
        """The dead engine's requests continue in the next free engine, except one that repeatedly kills engines."""
        engine, model = self._engine, self._model
        lost = self._tasks.engine_died(engine.assignment, request_ids, cause.kind, time.monotonic_ns())
        num_requeued = len(lost.requeued)
        logger.warning("%s: engine %d died, %d requests continue: %s", model.name, engine.index, num_requeued, cause)
        try:
            self._report_lost(lost.requeued, cause)
        finally:  # a failing report must not keep requests from another engine, or from being answered
            if lost.blamed is not None:
                engine.manager.reset_failures()
                self._fail_blamed(lost.blamed, cause)
            if model.why_no_engine():
                model.fail_all(unavailable(f"model '{model.name}' has no engine that survives: {cause}"))
            model.wake_engines()

    def _report_lost(self, requeued: Sequence[InferTask], cause: EngineDeadError) -> None:
        engine, model = self._engine, self._model
        model.prefixes.ended(engine)
        model.loras.engine_ended(engine.index)
        for task in requeued:
            task.engine_died(cause.kind)
        self._metrics.engine_lost(engine.index, cause.kind, self._tasks.num_waiting)
        self._reports.put_back(requeued, NO_ENGINE)

    def _on_request_events(self, events: Sequence[RequestEvent]) -> None:
        for event in events:
            task = self._tasks.get(event.request_id)
            if task is not None:
                task.engine_reported(event)

    def _on_stats(self, stats: EngineStats) -> None:
        self._metrics.engine_stats(self._engine.index, stats, self._tasks.num_waiting)
        self._model.report_lora_requests()
        if stats.num_requests_running or stats.num_requests_waiting:
            return
        if leaked := self._tasks.leaked_resources(self._model.assignments()):
            logger.error("an invariant of model '%s' is broken: %s", self._model.name, leaked)
            self._metrics.invariant_broken()

    def _on_refused(self, request_id: str, error: str) -> None:
        if (task := self._tasks.pop(request_id)) is not None:
            self._model.fail(task, invalid_argument(error))

    # --- one task's output --------------------------------------------------------------------------------------------

    def _handle_output(self, task: InferTask, output: StepOutput, step: StepTimes) -> None:
        if (end := output.finish_reason) is not None and (end == "abort" or end == "error"):
            self._handle_failure(task, output, end)
            return
        previous_ns = task.times.last_token_ns
        task.add_output(output, step.now_ns)
        if task.lost_ns:
            self._metrics.recovered(step.now_ns - task.lost_ns)
            task.lost_ns = 0
        if output.token_ids:
            if previous_ns:
                step.inter_token_s.append((step.now_ns - previous_ns) * 1e-9)
            else:
                step.first_token_s.append((step.now_ns - task.times.exec_start_ns) * 1e-9)
                self._model.prefixes.prompt_computed(task, step.now_ns)
        if (reason := task.assembler.finish_reason) is not None:
            self._remove(task, output)
            self._model.end_task(task, reason, step.now_ns)
        task.respond()

    def _handle_failure(self, task: InferTask, output: StepOutput, reason: str) -> None:
        if reason == "abort" and self._model.is_being_replaced(self._engine):
            return
        self._remove(task, output)
        error = unavailable("the engine was stopped before the request was finished")
        if reason == "error":
            make_error = invalid_argument if output.is_bad_input else internal
            error = make_error(output.error or "the engine failed on this request")
        self._model.fail(task, error, reason)

    def _remove(self, task: InferTask, output: StepOutput) -> None:
        """Removes the task from the map, and stops it in its engine unless it has ended there."""
        if output.finish_reason is not None:
            self._tasks.pop(task.request_id)
        else:
            self._tasks.pop_stopped(task.request_id, self._engine.assignment)
            self._engine.manager.wake()

    def _end_stopped(self, task: InferTask, error: TritonError | None) -> None:
        """error: None ends the task with its output so far, because its client stopped it."""
        if error is not None:
            is_refused = error.code is ErrorCode.UNAVAILABLE and not task.times.taken_ns
            self._model.fail(task, error, REFUSED if is_refused else "abort")
            return
        try:
            now_ns = time.monotonic_ns()
            task.add_output(StepOutput(task.request_id, finish_reason="abort"), now_ns)
            self._model.end_task(task, "abort", now_ns)
            task.respond()
        except Exception as failure:
            logger.exception("request %s: its last output could not be delivered", task.request_id)
            self._model.fail(task, internal(f"the response could not be built: {failure}"))

    def _fail_blamed(self, task: InferTask, cause: EngineDeadError) -> None:
        num_deaths = len(task.isolated_deaths)
        text = f"the request was ended because the engine died {num_deaths} times while running it: {cause}"
        logger.error("%s: request %s: %s", self._model.name, task.request_id, text)
        self._metrics.poisoned()
        self._model.fail(task, internal(text))
