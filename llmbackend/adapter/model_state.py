"""ModelState: the request queue and the infer-task map of one model version, and the LlmManager of each of its
instances.

For: the meeting point of Triton's threads (submit, cancel) and the engines' loops (pull, send). Does not know: tensors,
text.
Invariant: every task put in is answered with exactly one FINAL and removed: by its engine, by a cancel, or at shutdown.
Owner of queue, map and control lists: `_lock`, which is never held while a response is sent. A task is used by the loop
of the engine that took it, or by whoever popped it from the map. Names and roles are MindIE's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
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

from .engine_args import check_checkpoint, instance_config, read_model_arguments
from .infer_task import InferTask
from .metrics import LlmMetrics
from .request_conversion import ModelLimits, RequestConverter
from .text import load_text

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Engine:
    """One instance's LlmManager and the ids it must be told about. Owner of the lists: ModelState's lock."""

    index: int
    manager: LlmManager = field(init=False)
    info: ModelInfo = field(init=False)
    cancelled_ids: list[str] = field(default_factory=list)
    """Requests whose clients gave up; their tasks are still in the map."""
    stopped_ids: list[str] = field(default_factory=list)
    """Requests that a stop string ended before the engine did; their tasks are gone."""

    def is_ready(self) -> bool:
        try:
            self.manager.check_ready()
        except RuntimeError:
            return False
        return True


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
        self._metrics = LlmMetrics(model.backend, model.name, model.version)
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, InferRequest] = OrderedDict()
        self._tasks: dict[str, InferTask] = {}
        self._engine_of: dict[str, Engine] = {}
        self._engines: list[Engine] = []
        self._num_engines_made = 0
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
            self.converter = RequestConverter(self._text, self._limits(), decoupled=self._decoupled)
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
        self._metrics.close()

    def _make_manager(self, config: EngineConfig, engine: Engine) -> LlmManager:
        return LlmManager(
            config,
            get_requests=partial(self._get_requests, engine),
            send_responses=partial(self._send_responses, engine),
            control_signal=partial(self._control_signal, engine),
            stats=partial(self._on_stats, engine),
            status_response=self._on_status,
        )

    def _limits(self) -> ModelLimits:
        infos = [engine.info for engine in self._engines]
        return ModelLimits(
            max_tokens=min(min(info.max_model_len, info.num_blocks * info.block_size) for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
        )

    # --- from Triton's threads ----------------------------------------------------------------------------------------

    def submit(self, task: InferTask) -> None:
        """Queues a task and wakes the engines. A full queue answers it UNAVAILABLE."""
        request_id = task.request_id
        with self._lock:
            full = len(self._requests) >= self._arguments.max_queue_size
            if not full and self._engines:
                self._tasks[request_id] = task
        if request_id not in self._tasks:
            reason = f"its queue holds {self._arguments.max_queue_size} requests" if full else "no engine is running"
            self._fail(task, unavailable(f"model '{self._name}' takes no more requests: {reason}"))
            return
        # Before it is queued: afterwards it may be finished and released at any time.
        task.on_cancel(partial(self._cancel, request_id))
        with self._lock:
            if request_id in self._tasks:
                self._requests[request_id] = task.infer_request
            num_queued = len(self._requests)
            engines = tuple(self._engines)
        self._metrics.queued(num_queued)
        for engine in engines:
            engine.manager.wake()

    def _cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id not in self._tasks or not self._engines:
                return
            engine = self._engine_of.get(request_id, self._engines[0])
            engine.cancelled_ids.append(request_id)
        engine.manager.wake()

    # --- the five callbacks, on an engine's loop ----------------------------------------------------------------------

    def _get_requests(self, engine: Engine, room: int) -> Sequence[InferRequest]:
        """At most `room` requests in the order they came, and no more than this engine's share of the queue;
        none for an engine that is not ready while another is."""
        if not self._requests:
            return ()
        with self._lock:
            ready = [one for one in self._engines if one.is_ready()]
            if ready and engine not in ready:
                return ()
            share = -(-len(self._requests) // max(len(ready), 1))
            taken = [self._requests.popitem(last=False)[1] for _ in range(min(room, share))]
            tasks = [self._tasks[request.request_id] for request in taken]
            for request in taken:
                self._engine_of[request.request_id] = engine
        now_ns = time.monotonic_ns()
        for task in tasks:
            self._metrics.taken_by_engine(task, now_ns)
        return taken

    def _send_responses(self, engine: Engine, outputs: Sequence[StepOutput]) -> None:
        now_ns = time.monotonic_ns()
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
        """Answers cancelled requests and names those that this engine must drop."""
        if not engine.cancelled_ids and not engine.stopped_ids:
            return ()
        given_up: list[InferTask] = []
        with self._lock:
            stop, engine.stopped_ids = engine.stopped_ids, []
            ids, engine.cancelled_ids = engine.cancelled_ids, []
            for request_id in ids:
                owner = self._engine_of.get(request_id)
                if owner is not None and owner is not engine:
                    owner.cancelled_ids.append(request_id)  # taken by another engine since
                    owner.manager.wake()
                    continue
                task = self._pop(request_id)
                if task is not None:
                    given_up.append(task)
                    if owner is engine:
                        stop.append(request_id)
            num_queued = len(self._requests)
        self._metrics.queued(num_queued)
        for task in given_up:
            self._fail(task, cancelled("Request was cancelled"), "abort")
        return [(request_id, Operation.STOP) for request_id in stop]

    def _on_stats(self, engine: Engine, stats: EngineStats) -> None:
        self._metrics.engine_stats(engine.index, stats, len(self._requests))

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
        self._requests.pop(request_id, None)
        self._engine_of.pop(request_id, None)
        return self._tasks.pop(request_id, None)

    def _fail(self, task: InferTask, error: TritonError, reason: str = "error") -> None:
        self._metrics.finished(task, reason, time.monotonic_ns())
        task.fail(error)
