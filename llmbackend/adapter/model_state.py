"""ModelState: one model version with its request queue and infer-task map, engines, tokenizer and limits.

Used by ModelInstanceState: its Execute thread submits requests here, and its engine's loop pulls them. Independent of
tensors, text, and how outputs become responses. Invariant: every submitted task is answered with exactly one FINAL, and
then removed. Names and roles are MindIE's.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from llmbackend.core.backend_api import (
    Model,
    ModelInstance,
    Request,
    Tenant,
    TritonError,
    cancelled,
    internal,
    responses_together,
    served_names,
    unavailable,
)
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.llm_manager import LlmManager
from llmbackend.engine.messages import Vocabulary
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Alarm, Timer

from .activity import NO_ENGINE, NO_ROW, received
from .device_placement import HOST_DEVICES
from .engine_args import (
    LORA_MODELS,
    LORA_NAMES,
    SAMPLING_DEFAULTS,
    TEXT_PARAMETERS,
    ModelArguments,
    check_checkpoint,
    read_model_arguments,
)
from .gguf_models import hold_directories
from .limits import ModelLimits
from .llmapi_config import ModelYaml
from .lora import LoraChange, LoraRegistry
from .metrics import REFUSED, LlmMetrics
from .requests.conversion_pool import Conversion, ConversionPool
from .requests.resuming import Piece
from .schemas.sampling import AUTO, NO_DEFAULTS, VLLM_DEFAULTS, read_sampling_defaults
from .schemas.schema import Schema
from .tasks.infer_task import InferTask
from .tasks.prefix_routing import EngineHandle, PrefixRouting
from .tasks.task_map import EngineAssignment, TaskMap
from .text.chat import CONTENT_AS_PARTS
from .text.tokenizer import ModelTokenizer
from .text.tokenizer_loading import TokenizerLoader

if TYPE_CHECKING:
    from .requests.request_conversion import RequestConverter

logger = logging.getLogger(__name__)
_SENT_TOGETHER: Final = 32
"""Number of repeated responses of a resumed request that are sent together."""


class ModelState:
    """One model version. `_lock` guards `_engines` and `converter`.

    A task is ended by its engine, by cancellation, at its deadline, or with the last engine. Tasks of an engine that
    stops or dies continue in another one; they get an error only if no engine will come back. A task is used only by
    the loop of the engine that took it, or by the thread that popped it from the map.
    """

    def __init__(self, model: Model, schema: Schema, model_yaml: ModelYaml | None = None) -> None:
        """Reads the model's arguments and the small files of its tokenizer. Raises TritonError INVALID_ARG."""
        self.name = model.name
        self.schema = schema
        self.arguments = read_model_arguments(model, model_yaml)
        engine = self.arguments.engine
        check_checkpoint(engine)
        hold_directories(engine, self)
        self._sampling_defaults = _sampling_defaults(model.name, schema, engine)
        reads_text = schema.needs_tokenizer and not engine.skip_tokenizer_init
        self._tokenizer = TokenizerLoader(engine) if reads_text else None
        self._policies = QueuePolicies.of(model.config.dynamic_batching)
        client_name = next(iter(served_names(model.config)), model.name)
        # Last of what can fail: `close`, which removes the series, is not called for a model that was not created.
        self.metrics = LlmMetrics(model.backend, model.name, model.version, self.arguments.reports_metrics, client_name)
        self.prefixes = PrefixRouting(self.arguments.engine.enable_prefix_caching)
        self.tasks = TaskMap(self._policies, self.arguments.max_queue_size, self.prefixes.placement)
        self._timer = Timer()
        self._conversions = ConversionPool(
            model.name,
            self.tasks,
            self._timer,
            submit=self.submit,
            stop=lambda task: self._request_stop(task.request_id, None),
            on_change=self.update_waiting_gauge,
            on_refused=self.metrics.refused,
        )
        self._lock = threading.Lock()
        self._engines: list[EngineHandle] = []
        self._engine_indices = itertools.count()
        self.converter: RequestConverter | None = None
        """None until the first engine has reported its limits. With several engines, the strictest limits apply."""
        configured = engine.lora_modules if engine.enable_lora else None
        self.loras = LoraRegistry(configured, self._timer, self.wake_engines, self.metrics.set_adapter)

    def public_parameters(self) -> dict[str, str]:
        """Parameters that are added to the model's configuration for frontends: adapters, chat template, formats of
        tool calls and reasoning, and sampling defaults (a JSON object)."""
        engine = self.arguments.engine
        values = {name: getattr(engine, name) for name in TEXT_PARAMETERS}
        values["chat_template"] = self._tokenizer.chat_template if self._tokenizer is not None else ""
        values[LORA_NAMES] = ",".join(engine.lora_modules if engine.enable_lora else ())
        values[SAMPLING_DEFAULTS] = json.dumps(dict(self._sampling_defaults)) if self._sampling_defaults else ""
        values[LORA_MODELS] = values[LORA_NAMES] if self.arguments.adapters_are_models else ""
        return {name: value for name, value in values.items() if value}

    def describe_text(self) -> dict[str, Any]:
        """The tokenizer, the chat template and the model's own sampling defaults, as JSON values. Raises TritonError
        INVALID_ARG if the tokenizer cannot be loaded."""
        description: dict[str, Any] = {"sampling_defaults": dict(self._sampling_defaults)}
        if self._tokenizer is not None:
            self._tokenizer.load()
            description |= {"tokenizer": self._tokenizer.kind, "chat_template": self._tokenizer.chat_template}
        return description

    # --- engines ------------------------------------------------------------------------------------------------------

    def new_engine(
        self, instance: ModelInstance, make_manager: Callable[[EngineConfig, int], LlmManager]
    ) -> EngineHandle:
        """A new, unstarted engine on the device of `instance`."""
        index = next(self._engine_indices)
        place = instance.name, instance.kind, instance.device_id
        placed = HOST_DEVICES.place(self.arguments.engine, *place, self.arguments.is_llmapi)
        config = self.arguments.with_device_defaults(placed).of_instance(index)
        try:
            return EngineHandle(index, config, make_manager(config, index))
        except BaseException:
            HOST_DEVICES.leave(config)
            raise

    def start_engine(self, engine: EngineHandle, instance_name: str) -> None:
        """Starts an engine and returns when its model is loaded. Raises TritonError: INTERNAL with the engine's reason,
        INVALID_ARG if the tokenizer cannot be loaded. After any exception, the engine has ended."""
        try:
            self._start_engine(engine, instance_name)
        except BaseException as error:
            self.stop_engine(engine)
            if isinstance(error, RuntimeError):
                raise internal(f"the engine of '{instance_name}' did not start: {error}") from error
            raise

    def _start_engine(self, engine: EngineHandle, instance_name: str) -> None:
        engine.info = engine.manager.start(meanwhile=self._prepare)
        self.metrics.engine_started(engine.index, engine.info, engine.config)
        tokenizer = ModelTokenizer() if self._tokenizer is None else self._tokenizer.verified()
        from .requests.request_conversion import RequestConverter

        with self._lock:
            self._engines.append(engine)
            limits = self._limits()
            self.converter = RequestConverter(
                self.schema, tokenizer, limits, self._policies, self._sampling_defaults, self.loras
            )
            self.prefixes.follow(self._engines)
        self.metrics.set_max_tokens(limits.max_tokens)
        engine.manager.prepare_grammars()
        logger.info("%s: %s", instance_name, engine.info.summary)
        if (held := engine.info.max_request_tokens) < engine.info.max_model_len:
            logger.warning(
                "%s: requests have at most %d tokens, of the model's %d: more do not fit the KV memory "
                "(kv_cache_memory_bytes)",
                *(instance_name, held, engine.info.max_model_len),
            )

    def _prepare(self) -> None:
        """Loads what requests need while the engine loads. Raises TritonError."""
        from .requests import request_conversion  # noqa: F401

        if self._tokenizer is not None:
            self._tokenizer.load()

    def stop_engine(self, engine: EngineHandle) -> None:
        """Ends an engine; its unfinished requests continue in another one. If it was the last one, they and the queued
        requests are answered with UNAVAILABLE."""
        with self._lock:
            if engine in self._engines:
                self._engines.remove(engine)
                self.prefixes.follow(self._engines)
            is_last = not self._engines
        unloaded = unavailable(f"model '{self.name}' was unloaded before the request was finished")
        if is_last:
            self._conversions.drain(unloaded)
        engine.manager.shutdown()
        self.loras.engine_ended(engine.index)
        self.prefixes.ended(engine)
        HOST_DEVICES.leave(engine.config)
        with self._lock:  # others may have been stopped during the shutdown, or may be stopped now
            if not is_last:
                self.tasks.hand_over(engine.assignment, self._engines[0].assignment)
        if is_last:
            self.fail_all(unloaded)
        else:
            self.metrics.engine_removed(engine.index, self.tasks.num_waiting)
            self.wake_engines()

    def close(self) -> None:
        """To be called after the last engine has ended."""
        self.loras.close()
        if self._tokenizer is not None:
            self._tokenizer.close()
        self._conversions.close()
        self._timer.stop()
        self.metrics.close()
        del self._conversions, self.loras, self.converter  # their callbacks refer to this object

    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer's vocabulary, for requests with a grammar."""
        return None if self._tokenizer is None else self._tokenizer.verified().vocabulary()

    def change_loras(self, change: LoraChange, answer: Callable[[TritonError | None], None]) -> None:
        """Loads or unloads an adapter asynchronously; `answer` is called when this is done or has failed. If it cannot
        begin, raises TritonError and does not call `answer`."""
        if change.action == "unload":
            self.loras.unload(change.name)
            answer(None)
            return
        if reason := self.why_no_engine():
            raise self._refused(reason)
        self.loras.load(change, lambda: [engine.index for engine in tuple(self._engines)], answer)

    def needs_engine(self) -> bool:
        """Whether an engine that ended because it was idle must be restarted."""
        return bool(self.tasks.num_queued) or self.loras.is_loading

    def ready_engines(self) -> list[EngineHandle]:
        """The engines that take requests now. One that is down would appear to have the most free slots: no request
        should wait for it."""
        return [engine for engine in tuple(self._engines) if engine.manager.is_up and not engine.why_not_ready()]

    def assignments(self) -> list[EngineAssignment]:
        return [engine.assignment for engine in tuple(self._engines)]

    def is_being_replaced(self, engine: EngineHandle) -> bool:
        """Whether the engine was stopped while others, which then get its requests, continue."""
        with self._lock:
            return bool(self._engines) and engine not in self._engines

    def why_no_engine(self) -> str:
        """Why no engine will take a request; "" if one will."""
        engines = tuple(self._engines)
        if not engines:
            return "no engine is running"
        return engines[0].why_not_ready() if all(engine.manager.is_given_up for engine in engines) else ""

    def _why_waiting(self) -> str:
        """Why a new request is not taken immediately; "" if it is."""
        ready = self.ready_engines()
        if not ready:
            return NO_ENGINE
        return "" if self.tasks.num_queued < sum(engine.manager.capacity for engine in ready) else NO_ROW

    def wake_engines(self) -> None:
        for engine in tuple(self._engines):
            engine.manager.wake()

    def wake_later(self, engine: EngineHandle, due_ns: int) -> None:
        """Makes an engine that left requests to others check again at `due_ns`, or at its existing alarm if that is
        earlier. Called on the engine's loop."""
        if not time.monotonic_ns() < engine.wakes_at_ns <= due_ns:
            engine.wakes_at_ns = due_ns
            self._timer.start()
            self._timer.set(engine.manager.wake, due_ns)

    def _limits(self) -> ModelLimits:
        infos, engine = [engine.info for engine in self._engines], self.arguments.engine
        vocab_size = min(info.vocab_size for info in infos)
        as_parts = {CONTENT_AS_PARTS: True} if engine.chat_template_content_format == "openai" else {}
        return ModelLimits(
            max_tokens=min(info.max_request_tokens for info in infos),
            vocab_size=vocab_size,
            max_prompt_tokens=self.arguments.max_prompt_tokens,
            max_output_tokens=_max_output_tokens(self.arguments, self._sampling_defaults),
            kv_block_size=max(info.block_size for info in infos),
            eos_token_ids=infos[0].eos_token_ids,
            structured_outputs=engine.structured_outputs_config,
            max_messages_bytes=self.arguments.max_messages_bytes,
            trusts_request_templates=engine.trust_request_chat_template,
            template_options={**engine.default_chat_template_kwargs, **as_parts},
            max_logprobs=vocab_size if engine.max_logprobs < 0 else engine.max_logprobs,
        )

    def report_lora_requests(self) -> None:
        """Called on the engine's loop after a step."""
        if self.arguments.engine.enable_lora:
            self.metrics.set_lora_requests(self.tasks.lora_names, self.arguments.engine.max_loras)

    # --- requests come ------------------------------------------------------------------------------------------------

    def convert_later(
        self,
        request: Request,
        convert: Callable[[], Sequence[InferTask]],
        refuse: Callable[[TritonError], None],
    ) -> None:
        """Converts a long request on a thread other than its instance's, and submits its tasks. For `convert` and
        `refuse` see Conversion."""
        level = self._policies.level(self._policies.priority(request.priority))
        whole_ns, queue_ns = self._deadlines_ns(level, request.timeout_us, time.monotonic_ns())
        if not self._policies.policy(level).reject:
            queue_ns = 0
        deadline_ns = min((one for one in (whole_ns, queue_ns) if one), default=0)
        conversion = Conversion(request, level, deadline_ns, convert, refuse)
        if refusal := self._conversions.start(conversion):
            refuse(self._refused(refusal))

    def submit(self, tasks: Sequence[InferTask]) -> None:
        """Queues the tasks of a request and wakes the engines. If they cannot be queued, all are answered with
        UNAVAILABLE, or INTERNAL after an error. A task that has ended before (its client has all tokens) is answered.
        """
        try:
            self._submit(tasks)
        except Exception as error:
            logger.exception("request %s could not be queued", tasks[0].request_id)
            for task in tasks:
                self._give_up(task, internal(f"the request could not be queued: {error}"))

    def _give_up(self, task: InferTask, error: TritonError) -> None:
        """Ends a task in any state."""
        if task.request_id in self.tasks:
            self._request_stop(task.request_id, error)
        elif not task.has_ended:
            self.fail(task, error)

    def _submit(self, tasks: Sequence[InferTask]) -> None:
        tasks = self._unfinished(tasks)
        if not tasks:
            return
        if refusal := self.why_no_engine() or self.tasks.admit(*tasks):
            for task in tasks:
                self.fail(task, self._refused(refusal), REFUSED)
            return
        sender = tasks[0].sender
        if sender.activity.kinds:
            sender.activity.report(received(tasks, self._why_waiting()))
        self.prefixes.place(tasks)
        # Before they are queued: afterwards they can be finished and released at any time.
        for task in tasks:
            sender.on_cancel(partial(self._cancel, task.request_id))
            self._set_deadlines(task)
        for task in tasks:
            self.tasks.enqueue(task)
        self.update_waiting_gauge()
        self.wake_engines()

    def _unfinished(self, tasks: Sequence[InferTask]) -> Sequence[InferTask]:
        """The tasks that continue. First repeats the responses of a resumed request in portions, so that its receiver
        never gets many at once."""
        pieces = tasks[0].sender.take_earlier_pieces()
        for start in range(0, len(pieces), _SENT_TOGETHER):
            with responses_together():
                for piece in pieces[start : start + _SENT_TOGETHER]:
                    self._repeat(tasks[piece.index], piece)
        for task in tasks:
            if task.finish_reason is not None and not task.has_ended:
                self._end(task, task.finish_reason)
        return [task for task in tasks if not task.has_ended]

    def _repeat(self, task: InferTask, piece: Piece) -> None:
        """Recreates a response of a resumed request."""
        if task.has_ended:
            logger.error("%s: request %s: a delta is after the end of its generation", self.name, task.request_id)
            return
        if piece.error is not None:
            self.fail(task, piece.error.error())
            return
        for output in piece.outputs:
            task.repeat_output(output)
        if (reason := task.finish_reason) is not None:
            self._end(task, reason)
        else:
            task.respond()

    def _end(self, task: InferTask, reason: str) -> None:
        self.end_task(task, reason, time.monotonic_ns())
        task.respond()

    def update_waiting_gauge(self) -> None:
        """Called after a change of the queue. Steps update the gauge too."""
        self.metrics.queue_changed(self.tasks.num_waiting)

    def _refused(self, reason: str) -> TritonError:
        return unavailable(f"model '{self.name}' accepts no more requests: {reason}")

    def _deadlines_ns(self, level: int, timeout_us: int, start_ns: int) -> tuple[int, int]:
        """Deadlines of the whole request (its `timeout` and the model's request_timeout_s) and of its time in the
        queue; 0 = none."""
        timeouts_s = [self.arguments.request_timeout_s, timeout_us * 1e-6]
        timeout_s = min((one for one in timeouts_s if one), default=0.0)
        whole_ns = start_ns + int(timeout_s * 1e9) if timeout_s else 0
        return whole_ns, self._policies.policy(level).deadline_ns(start_ns, timeout_us)

    def _set_deadlines(self, task: InferTask) -> None:
        level, start_ns = task.infer_request.priority, task.times.exec_start_ns
        whole_ns, queue_ns = self._deadlines_ns(level, task.sender.timeout_us, start_ns)
        if whole_ns:
            self._set_alarm(task, partial(self._expire, task.request_id), whole_ns)
        if queue_ns:
            self._set_alarm(task, partial(self._expire_in_queue, task.request_id), queue_ns)

    def _set_alarm(self, task: InferTask, alarm: Alarm, due_ns: int) -> None:
        task.alarms.append(alarm)
        self._timer.start()
        self._timer.set(alarm, due_ns)

    # --- requests stopped early ---------------------------------------------------------------------------------------

    def stop_requests(self, client_id: str, by: Tenant) -> None:
        """Ends all requests with this id that `by` may end, with their output so far and without an error."""
        self._conversions.stop(client_id, by)
        for request_id in self.tasks.ids_of(client_id, by):
            self._request_stop(request_id, None)

    def _cancel(self, request_id: str) -> None:
        self._request_stop(request_id, cancelled("Request was cancelled"))

    def _expire(self, request_id: str) -> None:
        self._request_stop(request_id, unavailable("Request timeout expired"))

    def _expire_in_queue(self, request_id: str) -> None:
        if self.tasks.expired_in_queue(request_id):
            self._expire(request_id)

    def _request_stop(self, request_id: str, error: TritonError | None) -> None:
        """Asks an engine's loop to end the task, so that no other thread uses it. None: without an error."""
        engines = tuple(self._engines)
        assignment = self.tasks.request_stop(request_id, error, engines[0].assignment) if engines else None
        if assignment is not None:
            assignment.wake()

    # --- tasks end ----------------------------------------------------------------------------------------------------

    def fail(self, task: InferTask, error: TritonError, reason: str = "error") -> None:
        """Answers a task that is not in the map with an error, even if counting or reporting its end fails."""
        try:
            self.end_task(task, reason, time.monotonic_ns())
        except Exception:
            logger.exception("request %s: its end could not be counted", task.request_id)
        task.fail(error)
        for request_id in task.sender.take_useless():
            self._request_stop(request_id, error)

    def fail_all(self, error: TritonError) -> None:
        for task in self.tasks.pop_all():
            self.fail(task, error, "error" if task.times.taken_ns else REFUSED)

    def end_task(self, task: InferTask, reason: str, now_ns: int) -> None:
        """Clears a task's deadlines and counts it as finished, unless that has been done. The caller sends its last
        response afterwards."""
        if task.is_counted:
            return
        task.is_counted = True
        for alarm in task.alarms:
            self._timer.clear(alarm)
        self.metrics.finished(task, reason, now_ns)
        task.count_end(reason)


def _max_output_tokens(arguments: ModelArguments, defaults: Mapping[str, Any]) -> int:
    """0 = no limit. As in vLLM, max_new_tokens limits all requests if the operator gave it, and is only a default if
    it comes from the model's file."""
    engine, limits = arguments.engine, [arguments.max_output_tokens]
    is_given = (engine.override_generation_config or {}).get("max_new_tokens") is not None
    if is_given or engine.generation_config not in (AUTO, VLLM_DEFAULTS):
        limits.append(defaults.get("max_tokens", 0))
    return min(filter(None, limits), default=0)


def _sampling_defaults(model_name: str, schema: Schema, config: EngineConfig) -> dict[str, Any]:
    """The model's own defaults if its schema has them; otherwise warns about engine arguments that request some. Raises
    TritonError INVALID_ARG for an engine argument with an invalid value."""
    if schema.has_model_defaults:
        return read_sampling_defaults(config)
    if config.generation_config not in (AUTO, VLLM_DEFAULTS) or config.override_generation_config:
        logger.warning(
            "model '%s': generation_config and override_generation_config have no effect: requests of its backend get "
            "no sampling defaults from a model; the backend 'llm' applies them",
            model_name,
        )
    return dict(NO_DEFAULTS)
