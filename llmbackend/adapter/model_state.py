"""ModelState: the request queue and the infer-task map of one model version, and the LlmManager of each of its
instances.

For: the meeting point of Triton's threads (submit, cancel) and the engines' loops (pull, send). Does not know: tensors,
text, who has which task (the map does).
Invariants: every task put in is answered with exactly one FINAL and removed: by its engine, by a cancel, by its
deadline, or at shutdown. The death of an engine is no end: its tasks go on in the next engine that has room; only when
every engine is given up are they answered with an error.
A task is used by the loop of the engine that took it, or by whoever popped it from the map. `_lock` owns the list of
engines. Names and roles are MindIE's.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from llmbackend.core.backend_api import (
    Model,
    ModelInstance,
    Request,
    Tenant,
    TritonError,
    cancelled,
    internal,
    invalid_argument,
    unavailable,
)
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.infer_request import EngineStats, InferRequest, ModelInfo, StepOutput
from llmbackend.engine.llm_manager import LlmManager, Operation, StatusType
from llmbackend.engine.transport import EngineDeadError
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Alarm, Timer

from .conversion_pool import Conversion, ConversionPool
from .device_placement import DevicePlacement
from .engine_args import check_checkpoint, read_model_arguments
from .infer_task import InferTask
from .loading_text import LoadingText
from .metrics import LlmMetrics
from .request_conversion import ModelLimits, RequestConverter
from .sampling import NO_DEFAULTS
from .sampling_defaults import read_sampling_defaults
from .task_map import Holder, TaskMap
from .tensor_schema import Schema
from .text import NoText

logger = logging.getLogger(__name__)


class Engine:
    """One instance's LlmManager, and what it holds."""

    def __init__(self, index: int, config: EngineConfig, make_manager: Callable[[Engine], LlmManager]) -> None:
        self.index = index
        self.config = config
        self.manager = make_manager(self)
        self.holder = Holder(self.manager.wake)
        self.info: ModelInfo = self.manager.start()

    def why_not_ready(self) -> str:
        """Why nothing should be sent to it; "" when it is ready."""
        try:
            self.manager.check_ready()
        except RuntimeError as error:
            return str(error)
        return ""


class ModelState:
    def __init__(self, model: Model, schema: Schema) -> None:
        """Reads the model's arguments and its tokenizer. Raises TritonError INVALID_ARG saying what is wrong."""
        self._name = model.name
        self.schema = schema
        self._arguments = read_model_arguments(model)
        check_checkpoint(self._arguments.engine)
        self._sampling_defaults = (
            read_sampling_defaults(self._arguments.engine) if schema.has_vllms_defaults else NO_DEFAULTS
        )
        self._policies = QueuePolicies.of(model.config.dynamic_batching)
        self._metrics = LlmMetrics(model.backend, model.name, model.version, self._arguments.reports_metrics)
        self._tasks = TaskMap(self._policies, self._arguments.max_queue_size)
        self._timer = Timer()
        self._conversions = ConversionPool(model.name, self._tasks, self._timer, self._on_conversion)
        self._placement = DevicePlacement()
        self._lock = threading.Lock()
        self._engines: list[Engine] = []
        self._engine_numbers = itertools.count()
        self.converter: RequestConverter | None = None
        """Set when the first engine has said what fits; the strictest engine counts."""
        self._text = LoadingText(self._arguments.engine) if schema.needs_text else None

    @property
    def lora_names(self) -> tuple[str, ...] | None:
        """None when LoRA is not enabled."""
        engine = self._arguments.engine
        return tuple(engine.lora_modules) if engine.enable_lora else None

    # --- engines ------------------------------------------------------------------------------------------------------

    def start_engine(self, instance: ModelInstance) -> Engine:
        """Makes and starts the LlmManager of `instance`; returns when its model is loaded.

        Raises TritonError INTERNAL with the engine's reason.
        """
        config = self._arguments.with_device_defaults(self._placement.place(self._arguments.engine, instance))
        try:
            engine = Engine(next(self._engine_numbers), config, partial(self._make_manager, config))
        except RuntimeError as error:
            self._placement.leave(config)
            raise internal(f"the engine of '{instance.name}' did not start: {error}") from error
        self._metrics.engine_started(engine.index, engine.info.num_blocks, engine.info.block_size)
        text = NoText() if self._text is None else self._text.settled()
        with self._lock:
            self._engines.append(engine)
            limits = self._limits()
            self.converter = RequestConverter(self.schema, text, limits, self._policies, self._sampling_defaults)
        self._metrics.limits(limits.max_tokens)
        logger.info("%s: %s", instance.name, engine.info.description or f"loaded in {engine.info.load_s:.1f} s")
        return engine

    def stop_engine(self, engine: Engine) -> None:
        """Ends the engine; what it had not finished goes on in another one. When it was the last, that and the queue
        are answered UNAVAILABLE."""
        with self._lock:
            if engine in self._engines:
                self._engines.remove(engine)
            others = tuple(self._engines)
        unloaded = unavailable(f"model '{self._name}' was unloaded before the request was finished")
        if not others:
            self._conversions.drain(unloaded)
        engine.manager.shutdown()
        self._placement.leave(engine.config)
        if others:
            self._tasks.hand_over(engine.holder, others[0].holder)
            self._metrics.engine_removed(engine.index, self._tasks.num_waiting)
            _wake(others)
            return
        for task in self._tasks.pop_all():
            self._fail(task, unloaded)

    def close(self) -> None:
        if self._text is not None:
            self._text.close()
        self._conversions.close()
        self._timer.stop()
        self._metrics.close()

    def _make_manager(self, config: EngineConfig, engine: Engine) -> LlmManager:
        return LlmManager(
            config,
            get_requests=partial(self._get_requests, engine),
            send_responses=partial(self._send_responses, engine),
            control_signal=partial(self._control_signal, engine),
            stats=partial(self._on_stats, engine),
            status_response=self._on_status,
            engine_lost=partial(self._engine_lost, engine),
            stall_timeout_s=self._arguments.stall_timeout_s,
        )

    def _limits(self) -> ModelLimits:
        infos = [engine.info for engine in self._engines]
        return ModelLimits(
            max_tokens=min(min(info.max_model_len, info.num_blocks * info.block_size) for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
            max_prompt_tokens=self._arguments.max_prompt_tokens,
            max_output_tokens=self._arguments.max_output_tokens,
            lora_names=self.lora_names,
            kv_block_size=max(info.block_size for info in infos),
            makes_drafts=self._arguments.engine.speculative_config is not None,
            max_messages_bytes=self._arguments.max_messages_bytes,
        )

    # --- from Triton's threads ----------------------------------------------------------------------------------------

    def convert_later(
        self,
        request: Request,
        convert: Callable[[], Sequence[InferTask]],
        refuse: Callable[[TritonError], None],
    ) -> None:
        """Has a long request converted beside its instance's thread, and queues what comes out.

        convert: makes the tasks; none when it has answered the request itself. refuse: answers it with an error.
        """
        level = self._policies.level(self._policies.priority(request.priority))
        whole_ns, queue_ns = self._deadlines_ns(level, request.timeout_us, time.monotonic_ns())
        if not self._policies.policy(level).reject:
            queue_ns = 0
        deadline_ns = min((one for one in (whole_ns, queue_ns) if one), default=0)
        stop = lambda task: self._give_up(task.request_id, None)  # noqa: E731
        conversion = Conversion(request, level, deadline_ns, convert, refuse, self.submit, stop)
        if refusal := self._conversions.start(conversion):
            refuse(self._full(refusal))

    def _on_conversion(self) -> None:
        self._metrics.queued(self._tasks.num_waiting)

    def submit(self, task: InferTask) -> None:
        """Queues a task and wakes the engines. One that cannot be queued is answered UNAVAILABLE."""
        engines = tuple(self._engines)
        refusal = _no_engine(engines) or self._tasks.admit(task)
        if refusal:
            self._fail(task, self._full(refusal))
            return
        # Before it is queued: afterwards it may be finished and released at any time.
        task.on_cancel(partial(self._cancel, task.request_id))
        self._set_deadlines(task)
        self._tasks.enqueue(task)
        self._metrics.queued(self._tasks.num_waiting)
        _wake(engines)

    def stop_requests(self, client_id: str, by: Tenant) -> None:
        """Ends all requests with this id that `by` may end, with what they have so far and without an error."""
        self._conversions.stop(client_id, by)
        for request_id in self._tasks.ids_of(client_id, by):
            self._give_up(request_id, None)

    def _full(self, refusal: str) -> TritonError:
        return unavailable(f"model '{self._name}' takes no more requests: {refusal}")

    def _deadlines_ns(self, level: int, timeout_us: int, start_ns: int) -> tuple[int, int]:
        """For a whole request (its own `timeout`, the model's request_timeout_s), and for its time in the queue; 0 =
        none."""
        timeouts_s = [self._arguments.request_timeout_s, timeout_us * 1e-6]
        timeout_s = min((one for one in timeouts_s if one), default=0.0)
        whole_ns = start_ns + int(timeout_s * 1e9) if timeout_s else 0
        return whole_ns, self._policies.policy(level).deadline_ns(start_ns, timeout_us)

    def _set_deadlines(self, task: InferTask) -> None:
        level, start_ns = task.infer_request.priority, task.times.exec_start_ns
        whole_ns, queue_ns = self._deadlines_ns(level, task.timeout_us, start_ns)
        if whole_ns:
            self._set_alarm(task, partial(self._expire, task.request_id), whole_ns)
        if queue_ns:
            self._set_alarm(task, partial(self._expire_in_queue, task.request_id), queue_ns)

    def _set_alarm(self, task: InferTask, alarm: Alarm, due_ns: int) -> None:
        task.alarms.append(alarm)
        self._timer.start()
        self._timer.set(alarm, due_ns)

    def _cancel(self, request_id: str) -> None:
        self._give_up(request_id, cancelled("Request was cancelled"))

    def _expire(self, request_id: str) -> None:
        self._give_up(request_id, unavailable("Request timeout expired"))

    def _expire_in_queue(self, request_id: str) -> None:
        if self._tasks.expired_in_queue(request_id):
            self._expire(request_id)

    def _give_up(self, request_id: str, error: TritonError | None) -> None:
        """Has an engine's loop end the task, so that nobody else uses it at the same time. None: it ends well."""
        engines = tuple(self._engines)
        holder = self._tasks.give_up(request_id, error, engines[0].holder) if engines else None
        if holder is not None:
            holder.wake()

    # --- the callbacks, on an engine's loop ---------------------------------------------------------------------------

    def _get_requests(self, engine: Engine, room: int) -> Sequence[InferRequest]:
        """At most `room` requests in the queue's order, and no more than this engine's share of it; none for an engine
        that is not ready while another is."""
        if not self._tasks.num_queued:
            return ()
        ready = [one for one in tuple(self._engines) if not one.why_not_ready()]
        if ready and engine not in ready:
            return ()
        tasks = self._tasks.take(engine.holder, room, max(len(ready), 1))
        now_ns = time.monotonic_ns()
        for task in tasks:
            if not task.output_token_ids:
                self._metrics.taken_by_engine(task, now_ns)
            task.times.taken_ns = task.times.taken_ns or now_ns
        return [task.resume_request() for task in tasks]

    def _send_responses(self, engine: Engine, outputs: Sequence[StepOutput]) -> None:
        now_ns = time.monotonic_ns()
        self._tasks.outputs_came(engine.holder, outputs)
        for output in outputs:
            task = self._tasks.get(output.request_id)
            if task is None:
                continue  # cancelled or stopped while the step ran
            try:
                self._deliver(engine, task, output, now_ns)
            except Exception as error:
                logger.exception("request %s: its output could not be delivered", output.request_id)
                self._end(engine, task, output)
                task.fail(internal(f"the response could not be made: {error}"))

    def _control_signal(self, engine: Engine) -> Sequence[tuple[str, Operation]]:
        """Answers requests that were given up and names those that this engine must drop."""
        controls = self._tasks.controls(engine.holder)
        for task, error in controls.ended:
            if error is None:
                self._finish_early(task)
            else:
                self._fail(task, error, "abort")
        for holder in controls.elsewhere:
            holder.wake()
        if controls.ended:
            self._metrics.queued(self._tasks.num_waiting)
        return [(request_id, Operation.STOP) for request_id in controls.stop]

    def _engine_lost(self, engine: Engine, request_ids: Sequence[str], cause: EngineDeadError) -> None:
        """What the dead engine had goes on in the next one that has room, but for a request that keeps killing."""
        loss = self._tasks.engine_died(engine.holder, request_ids, cause.kind, time.monotonic_ns())
        logger.warning("%s: engine %d died, %d requests go on: %s", self._name, engine.index, len(loss.go_on), cause)
        self._metrics.engine_lost(engine.index, cause.kind, self._tasks.num_waiting)
        if loss.convicted is not None:
            engine.manager.pardon()
            self._convict(loss.convicted, cause)
        engines = tuple(self._engines)
        if _no_engine(engines):
            for task in self._tasks.pop_all():
                self._fail(task, unavailable(f"model '{self._name}' has no engine that stays alive: {cause}"))
        _wake(engines)

    def _convict(self, task: InferTask, cause: EngineDeadError) -> None:
        text = f"the request was ended because the engine died {len(task.trial_deaths)} times while it ran it: {cause}"
        logger.error("%s: request %s: %s", self._name, task.request_id, text)
        self._metrics.poisoned()
        self._fail(task, internal(text))

    def _on_stats(self, engine: Engine, stats: EngineStats) -> None:
        self._metrics.engine_stats(engine.index, stats, self._tasks.num_waiting)
        if stats.num_requests_running or stats.num_requests_waiting:
            return
        leftovers = self._tasks.leftovers([one.holder for one in tuple(self._engines)])
        if leftovers:
            logger.error("an invariant of model '%s' is broken: %s", self._name, leftovers)
            self._metrics.invariant_broken()

    def _on_status(self, request_id: str, error: str, kind: StatusType) -> None:
        """A request that the engine refused; a control operation's failure concerns nobody but the log."""
        if not error:
            return
        if kind is not StatusType.REQUEST_ENQUEUE_STATUS:
            logger.debug("request %s: %s", request_id, error)  # it ended by itself meanwhile
            return
        task = self._tasks.pop(request_id)
        if task is not None:
            self._fail(task, invalid_argument(error))

    # --- the end of a task --------------------------------------------------------------------------------------------

    def _deliver(self, engine: Engine, task: InferTask, output: StepOutput, now_ns: int) -> None:
        if output.finish_reason == "abort" and self._is_being_replaced(engine):
            return
        if output.finish_reason in ("abort", "error"):
            self._end(engine, task, output)
            error = unavailable("the engine was stopped before the request was finished")
            if output.finish_reason == "error":
                error = internal(output.error or "the engine failed on this request")
            self._fail(task, error, output.finish_reason)
            return
        previous_ns = task.times.last_token_ns
        task.take_in(output, now_ns)
        if task.lost_ns:
            self._metrics.recovered(now_ns - task.lost_ns)
            task.lost_ns = 0
        if output.token_ids:
            self._metrics.output(task, previous_ns, now_ns)
        if task.finish_reason is not None:
            self._end(engine, task, output)
            self._finished(task, task.finish_reason, now_ns)
        task.deliver()

    def _is_being_replaced(self, engine: Engine) -> bool:
        """Whether the engine was stopped while others go on, which then get what it had."""
        with self._lock:
            return bool(self._engines) and engine not in self._engines

    def _end(self, engine: Engine, task: InferTask, output: StepOutput) -> None:
        """Takes the task out of the map; an engine that does not know yet that it ended is told to stop."""
        if output.finish_reason is not None:
            self._tasks.pop(task.request_id)
        else:
            self._tasks.pop_stopped(task.request_id, engine.holder)
            engine.manager.wake()

    def _finish_early(self, task: InferTask) -> None:
        now_ns = time.monotonic_ns()
        task.take_in(StepOutput(task.request_id, finish_reason="abort"), now_ns)
        self._finished(task, "abort", now_ns)
        task.deliver()

    def _fail(self, task: InferTask, error: TritonError, reason: str = "error") -> None:
        self._finished(task, reason, time.monotonic_ns())
        task.fail(error)

    def _finished(self, task: InferTask, reason: str, now_ns: int) -> None:
        for alarm in task.alarms:
            self._timer.clear(alarm)
        self._metrics.finished(task, reason, now_ns)


def _no_engine(engines: Sequence[Engine]) -> str:
    """Why no engine will take a request, or "" when one will."""
    if not engines:
        return "no engine is running"
    return engines[0].why_not_ready() if all(engine.manager.is_given_up for engine in engines) else ""


def _wake(engines: Iterable[Engine]) -> None:
    for engine in engines:
        engine.manager.wake()
