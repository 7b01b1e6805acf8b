"""The host's services for one stub process: responses to its requests, BLS, metrics, readiness, log lines. Each request
opened here is ended here, even if the stub ends. A metric lives as long as a model version that created it, so a
restarted instance continues counting."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from llmbackend.core.backend_api import (
    Backend,
    MetricFamily,
    MetricKind,
    Model,
    Request,
    Tenant,
    TritonError,
    common_tenant,
    internal,
    invalid_argument,
)

from .requests import BlsRequests, PackResponse, Responder, bls_request, check_bls_request, state_outputs
from .stub.packets import Message
from .stub.pb_request import PackedTenant
from .stub_process import StubProcess
from .wire_messages import execute_error, not_healthy, pack_error, pack_response, unpack_response, unpack_tenant

TIMEOUT_S = 5.0
FRESH_S = 0.1
WITH_PARTS = ("response", "infer", "state")
"""Messages that carry tensors."""

log = logging.getLogger(__name__)
model_log = logging.getLogger("llmbackend.backends.python.model")

_MetricKey = tuple[str, tuple[tuple[str, str], ...]]


class MetricUsers:
    """Counts the model versions that use each metric; one object per backend."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[_MetricKey] = Counter()


class ModelMetrics:
    """The metrics that one model version creates through pb_utils. Thread-safe."""

    def __init__(self, backend: Backend, users: MetricUsers) -> None:
        self._backend = backend
        self._users = users
        self._numbers: dict[_MetricKey, int] = {}
        self._metrics: list[tuple[MetricFamily, dict[str, str]]] = []

    def open_family(self, kind: str, name: str, description: str) -> None:
        """Raises TritonError ALREADY_EXISTS if the family has another kind, INVALID_ARG for an invalid name."""
        self._family(kind, name, description)

    def open(
        self, kind: str, name: str, description: str, labels: dict[str, str], buckets: Sequence[float] | None
    ) -> int:
        """Exports a metric. Returns its id. Raises TritonError like `open_family`, and for invalid labels or
        buckets."""
        family = self._family(kind, name, description)
        key = (name, tuple(sorted(labels.items())))
        with self._users.lock:
            family.declare(buckets, **labels)
            if key not in self._numbers:
                self._users.counts[key] += 1
                self._numbers[key] = len(self._metrics)
                self._metrics.append((family, labels))
            return self._numbers[key]

    def change(self, number: int, action: str, value: float) -> None:
        family, labels = self._metrics[number]
        if action not in ("increment", "set", "observe"):
            raise invalid_argument(f"a metric has no action {action!r}")
        getattr(family, action)(value, **labels)

    def value(self, number: int) -> float:
        family, labels = self._metrics[number]
        return family.value(**labels)

    def close(self) -> None:
        with self._users.lock:
            for key, number in self._numbers.items():
                self._users.counts[key] -= 1
                if not self._users.counts[key]:
                    del self._users.counts[key]
                    family, labels = self._metrics[number]
                    family.remove(**labels)
            self._numbers.clear()

    def _family(self, kind: str, name: str, description: str) -> MetricFamily:
        return self._backend.metric_family(MetricKind(kind), name, description, None)


class StubReadiness:
    """The result of a model's own `is_ready()`. Thread-safe. The model is asked one question at a time, and an answer
    is valid for FRESH_S. Each caller is answered within TIMEOUT_S (Triton's 5 s), even if the model hangs or dies."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """ask: sends the question and returns; `answer` follows."""
        self._ask = ask
        self._lock = threading.Lock()
        self._pending: Future[str] | None = None
        self._last: tuple[float, str] | None = None
        self._end: str | None = None

    def reason(self) -> str:
        with self._lock:
            if self._end is not None:
                return self._end
            if self._last is not None and time.monotonic() - self._last[0] < FRESH_S:
                return self._last[1]
            if self._pending is None:
                self._pending = Future()
                self._ask()
            pending = self._pending
        try:
            return pending.result(TIMEOUT_S)
        except TimeoutError:
            return f"is_ready() has not returned within {TIMEOUT_S:g} s"

    def answer(self, reason: str) -> None:
        with self._lock:
            self._last = (time.monotonic(), reason)
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.set_result(reason)

    def close(self, reason: str) -> None:
        with self._lock:
            self._end = reason
        self.answer(reason)


class ChildServices(ABC):
    """The host's services for any instance process: readiness, calls of models, log, answers. `handle` and `abandon`
    are called on the thread of the process's messages, the rest on the instance's thread.

    model: None for a process that makes no calls of models
    """

    def __init__(self, model: Model | None, output: logging.Logger, pack: PackResponse = pack_response) -> None:
        self.process: StubProcess
        self.has_model = False
        self.tells_readiness = False
        self.is_abandoned = False
        self._called_model = model
        self._output = output
        self._pack = pack
        self._bls: BlsRequests
        self._readiness: StubReadiness
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._questions: dict[str, Callable[..., Any]]
        self._slow_questions: dict[str, Callable[..., Any]]
        """Calls that are answered; the slow ones on a thread each."""

    def connect(self, process: StubProcess) -> None:
        """To be called before the first call of the process, which sends nothing until then."""
        self.process = process
        self._readiness = StubReadiness(partial(process.outbox.post, ("is_ready",)))
        if self._called_model is not None:
            self._bls = BlsRequests(self._called_model, process.outbox, self._pack)

    def not_ready_reason(self) -> str:
        return self._readiness.reason() if self.tells_readiness else ""

    def abandon(self, error: TritonError) -> None:
        """Called when the process has ended: ends its requests with `error`."""
        self.is_abandoned = True
        self._fail_all(error)
        self._readiness.close(error.message)
        if self._called_model is not None:
            self._bls.cancel_all()

    @abstractmethod
    def _fail_all(self, error: TritonError) -> None: ...

    def handle(self, message: Message) -> None:
        """Raises for a malformed message."""
        (verb, *arguments), parts = message
        if verb in self._questions:
            self._reply(self._questions[verb], *arguments)
        elif verb in self._slow_questions:
            arguments = [self._slow_questions[verb], *arguments]
            threading.Thread(target=self._reply, args=arguments, name="stub-control", daemon=True).start()
        else:
            on_message = getattr(self, f"_on_{verb}")
            try:
                on_message(*arguments, parts) if verb in WITH_PARTS else on_message(*arguments)
            except TritonError as error:  # the process has already been told that its call succeeded
                log.error("a call of process '%s' failed: %s", self.process.name, error.status)

    def _on_cancel_infer(self, number: int) -> None:
        self._bls.cancel(number)

    def _on_is_ready(self, reason: str) -> None:
        self._readiness.answer(reason)

    def _on_log(self, level: int, file: str, line: int, text: str) -> None:
        if self._output.isEnabledFor(level):
            self._output.handle(self._output.makeRecord(self._output.name, level, file, line, "%s", (text,), None))

    def _reply(self, function: Callable[..., Any], question: int, *arguments: Any) -> None:
        answer: tuple[Any, Any]
        try:
            answer = (None, function(*arguments))
        except TritonError as error:
            answer = (pack_error(error), None)
        except Exception as error:  # a bug; the process must not wait forever
            log.exception("a call of process '%s' to the host failed", self.process.name)
            answer = (pack_error(internal(f"{type(error).__name__}: {error}")), None)
        self.process.outbox.post(("answer", question, answer, True))


class StubServices(ChildServices):
    """The host's services for a stub of the python backend."""

    def __init__(self, model: Model, metrics: ModelMetrics) -> None:
        super().__init__(model, model_log)
        self._model = model
        self._metrics = metrics
        self._states = state_outputs(model.config)
        self._responders: dict[int, Responder] = {}
        self._questions = {
            "metric_family": metrics.open_family,
            "metric_open": metrics.open,
            "metric_value": metrics.value,
        }
        self._slow_questions = {
            "load_model": model.load_model,
            "unload_model": model.unload_model,
            "is_model_ready": model.is_model_ready,
        }

    def open(self, request: Request) -> int:
        responder, number = Responder(request, self._states), next(self._numbers)
        with self._lock:
            self._responders[number] = responder
        if self.is_abandoned and self.take(number) is not None:
            responder.fail(not_healthy(self.process.name, self.process.cause))
        request.on_cancel(partial(self.process.outbox.post, ("cancel", number)))
        return number

    def take(self, number: int) -> Responder | None:
        """Takes a request from the stub; None if the stub has ended it."""
        with self._lock:
            return self._responders.pop(number, None)

    def _fail_all(self, error: TritonError) -> None:
        with self._lock:
            responders = list(self._responders.values())
            self._responders.clear()
        for responder in responders:
            responder.fail(error)

    def _on_response(self, number: int, packed: Any, is_last: bool, parts: Sequence[Any]) -> None:
        responder = self.take(number) if is_last else self._responders.get(number)
        if responder is not None:
            outputs, parameters, error = unpack_response(packed, parts)
            responder.send(outputs, parameters, error, is_last=is_last)

    def _on_final(self, number: int) -> None:
        if (responder := self.take(number)) is not None:
            responder.finish()

    def _on_failed(self, number: int, text: str) -> None:
        if (responder := self.take(number)) is not None:
            responder.fail(execute_error(self.process.name, text))

    def _on_dropped(self, number: int) -> None:
        if (responder := self.take(number)) is not None:
            responder.abandon()

    def _on_infer(self, number: int, is_stream: bool, fields: dict[str, Any], parts: Sequence[Any]) -> None:
        parent = self._responders.get(fields["parent"])  # the request whose trace the model passed on
        trace = None if parent is None else parent.trace
        request = bls_request(fields, parts, trace, self._tenant_of(fields["tenants"]))
        self._bls.start(number, request, partial(check_bls_request, self._model, request, is_stream))

    def _tenant_of(self, packed: Collection[PackedTenant] | None) -> Tenant:
        """The tenant of a call; one from a thread of the model's own may be for any of the stub's requests."""
        if packed is not None:
            return common_tenant(frozenset(map(unpack_tenant, packed)))
        with self._lock:
            return common_tenant(frozenset(responder.tenant for responder in self._responders.values()))

    def _on_metric(self, number: int, action: str, value: float) -> None:
        """The stub has refused what it can."""
        self._metrics.change(number, action, value)
