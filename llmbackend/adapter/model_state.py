"""ModelState: the request queue and the infer-task map of one model version, and the LlmManager of each of its
instances.

For: the meeting point of Triton's threads (submit, cancel) and the engines' loops (pull, send). Does not know: tensors,
text.
Invariants: every task put in is answered with exactly one FINAL and removed: by its engine, by a cancel, by its
deadline, or at shutdown. The death of an engine is no end: its tasks go back to the front of the queue, with the tokens
so far, for the next engine that has room; only when every engine is given up are they answered with an error.
Owner of queue, map and control lists: `_lock`, which is never held while a response is sent. A task is used by the loop
of the engine that took it, or by whoever popped it from the map. Names and roles are MindIE's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from llmbackend.core.backend_api import (
    Model,
    ModelInstance,
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

from .deadlines import Deadlines
from .engine_args import check_checkpoint, instance_config, read_model_arguments
from .infer_task import InferTask
from .metrics import LlmMetrics
from .probation import STRIKES, Probation
from .request_conversion import ModelLimits, RequestConverter
from .task_queue import QueuePolicies, TaskQueue
from .text import load_text

logger = logging.getLogger(__name__)

EXPIRED = "Request timeout expired"


@dataclass(eq=False, slots=True)
class Engine:
    """One instance's LlmManager and the ids it must be told about. Owner of the lists: ModelState's lock."""

    index: int
    manager: LlmManager = field(init=False)
    info: ModelInfo = field(init=False)
    probation: Probation = field(default_factory=Probation)
    given_up: list[tuple[str, TritonError]] = field(default_factory=list)
    """Requests to end with this error: cancelled, or too late. Their tasks are still in the map."""
    stopped_ids: list[str] = field(default_factory=list)
    """Requests that a stop string ended before the engine did; their tasks are gone."""

    def why_not_ready(self) -> str:
        """ "" when it is."""
        try:
            self.manager.check_ready()
        except RuntimeError as error:
            return str(error)
        return ""

    def is_ready(self) -> bool:
        return not self.why_not_ready()


class ModelState:
    def __init__(self, model: Model) -> None:
        """Reads the model's arguments and its tokenizer. Raises TritonError INVALID_ARG saying what is wrong."""
        self._name = model.name
        self._arguments = read_model_arguments(model)
        config = self._arguments.engine
        check_checkpoint(config.model)
        try:
            self._text = load_text(config.model, config.tokenizer, trust_remote_code=config.trust_remote_code)
        except (ValueError, OSError, ImportError) as error:
            source = config.tokenizer or config.model
            raise invalid_argument(f"the tokenizer of '{source}' cannot be loaded: {error}") from error
        self._decoupled = model.config.model_transaction_policy.decoupled
        self._policies = QueuePolicies(model.config)
        self._metrics = LlmMetrics(model.backend, model.name, model.version)
        self._lock = threading.Lock()
        self._requests = TaskQueue()
        self._tasks: dict[str, InferTask] = {}
        self._engine_of: dict[str, Engine] = {}
        self._engines: list[Engine] = []
        self._num_engines_made = 0
        self._deadlines = Deadlines(self._tasks.__contains__)
        self.converter: RequestConverter | None = None
        """Set when the first engine has said what fits; the strictest engine counts."""

    # --- engines ------------------------------------------------------------------------------------------------------

    def start_engine(self, instance: ModelInstance) -> Engine:
        """Makes and starts the LlmManager of `instance`; returns when its model is loaded.

        Raises TritonError INTERNAL with the engine's reason.
        """
        config = instance_config(self._arguments.engine, instance)
        with self._lock:
            engine = Engine(self._num_engines_made)
            self._num_engines_made += 1
        engine.manager = self._make_manager(config, engine)
        try:
            engine.info = engine.manager.start()
        except RuntimeError as error:
            raise internal(f"the engine of '{instance.name}' did not start: {error}") from error
        with self._lock:
            self._engines.append(engine)
            self.converter = RequestConverter(self._text, self._limits(), self._policies, decoupled=self._decoupled)
        logger.info("%s: %s", instance.name, engine.info.description or f"loaded in {engine.info.load_s:.1f} s")
        return engine

    def stop_engine(self, engine: Engine) -> None:
        """Ends the engine; what it had not finished is answered UNAVAILABLE, and so is the queue when it was the
        last."""
        with self._lock:
            if engine in self._engines:
                self._engines.remove(engine)
        engine.manager.shutdown()
        with self._lock:
            ids = [request_id for request_id, owner in self._engine_of.items() if owner is engine]
            if not self._engines:
                ids = list(self._tasks)
            tasks = [task for task in map(self._pop, ids) if task is not None]
        for task in tasks:
            self._fail(task, unavailable(f"model '{self._name}' was unloaded before the request was finished"))

    def close(self) -> None:
        self._deadlines.close()
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
        )

    # --- from Triton's threads ----------------------------------------------------------------------------------------

    def submit(self, task: InferTask) -> None:
        """Queues a task and wakes the engines. One that cannot be queued is answered UNAVAILABLE."""
        request_id = task.request_id
        with self._lock:
            refusal = self._refusal(task)
            if not refusal:
                self._tasks[request_id] = task
        if refusal:
            self._fail(task, unavailable(f"model '{self._name}' takes no more requests: {refusal}"))
            return
        # Before it is queued: afterwards it may be finished and released at any time.
        task.on_cancel(partial(self._cancel, request_id))
        with self._lock:
            if request_id in self._tasks:
                self._requests.append(task)
            num_queued = len(self._requests)
            engines = tuple(self._engines)
        self._metrics.queued(num_queued)
        self._set_deadlines(task)
        _wake(engines)

    def _refusal(self, task: InferTask) -> str:
        """Under the lock: why a task cannot be queued now, or ""."""
        level = task.infer_request.priority
        most, in_level = self._policies.of(level).max_queue_size, self._requests.num_in_level(level)
        if not self._engines:
            return "no engine is running"
        if all(engine.manager.is_given_up for engine in self._engines):
            return self._engines[0].why_not_ready()
        if most and in_level >= most:
            return f"its queue holds {in_level} requests of this priority"
        if len(self._requests) >= self._arguments.max_queue_size:
            return f"its queue holds {self._arguments.max_queue_size} requests"
        return ""

    def _set_deadlines(self, task: InferTask) -> None:
        """For the whole request (its own `timeout`, the model's request_timeout_s), and for its time in the queue."""
        timeouts_s = [self._arguments.request_timeout_s, task.timeout_us * 1e-6]
        timeout_s = min((one for one in timeouts_s if one), default=0.0)
        start_ns = task.times.exec_start_ns
        if timeout_s:
            self._deadlines.add(start_ns + int(timeout_s * 1e9), task.request_id, self._expire)
        queue_us = self._policies.of(task.infer_request.priority).timeout_us
        if queue_us:
            self._deadlines.add(start_ns + queue_us * 1000, task.request_id, self._expire_in_queue)

    def _cancel(self, request_id: str) -> None:
        self._give_up(request_id, cancelled("Request was cancelled"))

    def _expire(self, request_id: str) -> None:
        self._give_up(request_id, unavailable(EXPIRED))

    def _expire_in_queue(self, request_id: str) -> None:
        with self._lock:
            task = self._tasks.get(request_id)
            if task is None or task not in self._requests:
                return
            if not self._policies.of(task.infer_request.priority).reject:
                self._requests.delay(task)
                return
        self._give_up(request_id, unavailable(EXPIRED))

    def _give_up(self, request_id: str, error: TritonError) -> None:
        """Has the loop of the task's engine, or of any while it is queued, end the task."""
        with self._lock:
            if request_id not in self._tasks or not self._engines:
                return
            engine = self._engine_of.get(request_id, self._engines[0])
            engine.given_up.append((request_id, error))
        engine.manager.wake()

    # --- the callbacks, on an engine's loop ---------------------------------------------------------------------------

    def _get_requests(self, engine: Engine, room: int) -> Sequence[InferRequest]:
        """At most `room` requests in the queue's order, and no more than this engine's share of it; none for an engine
        that is not ready while another is."""
        if not self._requests:
            return ()
        with self._lock:
            tasks = self._take(engine, room)
        now_ns = time.monotonic_ns()
        for task in tasks:
            if not task.output_token_ids:
                self._metrics.taken_by_engine(task, now_ns)
        return [task.resume_request() for task in tasks]

    def _take(self, engine: Engine, room: int) -> list[InferTask]:
        ready = [one for one in self._engines if one.is_ready()]
        if ready and engine not in ready:
            return []
        share = -(-len(self._requests) // max(len(ready), 1))
        taken: list[InferTask] = []
        while len(taken) < min(room, share):
            task = self._requests.head()
            if task is None or not engine.probation.admits(task):
                break
            self._requests.remove(task)
            self._engine_of[task.request_id] = engine
            engine.probation.take(task)
            taken.append(task)
        return taken

    def _send_responses(self, engine: Engine, outputs: Sequence[StepOutput]) -> None:
        now_ns = time.monotonic_ns()
        if engine.probation:
            self._end_probation(engine, outputs)
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

    def _end_probation(self, engine: Engine, outputs: Sequence[StepOutput]) -> None:
        with self._lock:
            for output in outputs:
                engine.probation.leave(output.request_id)

    def _control_signal(self, engine: Engine) -> Sequence[tuple[str, Operation]]:
        """Answers requests that were given up and names those that this engine must drop."""
        if not engine.given_up and not engine.stopped_ids:
            return ()
        ended: list[tuple[InferTask, TritonError]] = []
        with self._lock:
            stop, engine.stopped_ids = engine.stopped_ids, []
            given_up, engine.given_up = engine.given_up, []
            for request_id, error in given_up:
                owner = self._engine_of.get(request_id)
                if owner is not None and owner is not engine:
                    owner.given_up.append((request_id, error))  # taken by another engine since
                    owner.manager.wake()
                    continue
                task = self._pop(request_id)
                if task is not None:
                    ended.append((task, error))
                    if owner is engine:
                        stop.append(request_id)
            num_queued = len(self._requests)
        self._metrics.queued(num_queued)
        for task, error in ended:
            self._fail(task, error, "abort")
        return [(request_id, Operation.STOP) for request_id in stop]

    def _engine_lost(self, engine: Engine, request_ids: Sequence[str], cause: EngineDeadError) -> None:
        """Gives what the dead engine had to the next one that has room, but for a request that keeps killing."""
        now_ns = time.monotonic_ns()
        with self._lock:
            engine.stopped_ids.clear()
            convicted = engine.probation.engine_died()
            lost = [self._tasks[one] for one in request_ids if self._engine_of.pop(one, None) and one in self._tasks]
            for task in lost:
                task.lost_ns = task.lost_ns or now_ns
            self._requests.put_back(lost)
            hopeless = all(one.manager.is_given_up for one in self._engines)
            ended = list(self._tasks.values()) if hopeless else [convicted] if convicted else []
            for task in ended:
                self._pop(task.request_id)
            engines, num_queued = tuple(self._engines), len(self._requests)
            num_go_on = sum(task.request_id in self._tasks for task in lost)
        logger.warning("%s: engine %d is replaced, %d requests go on", self._name, engine.index, num_go_on)
        self._metrics.engine_lost(engine.index, cause.kind, num_queued, poisoned=convicted is not None)
        for task in ended:
            self._fail(task, self._poisoned(cause) if task is convicted else self._no_engine(cause))
        _wake(engines)

    def _poisoned(self, cause: EngineDeadError) -> TritonError:
        return internal(f"the request was ended because the engine died {STRIKES} times while it ran it: {cause}")

    def _no_engine(self, cause: EngineDeadError) -> TritonError:
        return unavailable(f"model '{self._name}' has no engine that stays alive: {cause}")

    def _check_idle(self) -> None:
        """The self-check of a model whose engine has nothing to do: without tasks nothing else may be left."""
        with self._lock:
            held = sum(len(engine.probation) for engine in self._engines)
            left = (len(self._requests), len(self._engine_of), held)
            if self._tasks or not any(left):
                return
        logger.error("%s: without a task, %d are queued, %d owned by an engine, %d on probation", self._name, *left)
        self._metrics.invariant_broken()

    def _on_stats(self, engine: Engine, stats: EngineStats) -> None:
        self._metrics.engine_stats(engine.index, stats, len(self._requests))
        if not stats.num_requests_running and not stats.num_requests_waiting:
            self._check_idle()

    def _on_status(self, request_id: str, error: str, kind: StatusType) -> None:
        """A request that the engine refused; a control operation's failure concerns nobody but the log."""
        if not error:
            return
        if kind is not StatusType.REQUEST_ENQUEUE_STATUS:
            logger.debug("request %s: %s", request_id, error)  # it ended by itself meanwhile
            return
        with self._lock:
            task = self._pop(request_id)
        if task is not None:
            self._fail(task, invalid_argument(error))

    # --- the end of a task --------------------------------------------------------------------------------------------

    def _deliver(self, engine: Engine, task: InferTask, output: StepOutput, now_ns: int) -> None:
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
            self._metrics.finished(task, task.finish_reason, now_ns)
        task.deliver()

    def _end(self, engine: Engine, task: InferTask, output: StepOutput) -> None:
        """Takes the task out of the map; an engine that does not know yet that it ended is told to stop."""
        with self._lock:
            self._pop(task.request_id)
            if output.finish_reason is not None:
                return
            engine.stopped_ids.append(task.request_id)
        engine.manager.wake()

    def _pop(self, request_id: str) -> InferTask | None:
        """Under the lock: forgets a request, wherever it is."""
        task = self._tasks.pop(request_id, None)
        engine = self._engine_of.pop(request_id, None)
        if engine is not None:
            engine.probation.leave(request_id)
        if task is not None:
            self._requests.remove(task)
        return task

    def _fail(self, task: InferTask, error: TritonError, reason: str = "error") -> None:
        self._metrics.finished(task, reason, time.monotonic_ns())
        task.fail(error)


def _wake(engines: Iterable[Engine]) -> None:
    for engine in engines:
        engine.manager.wake()
