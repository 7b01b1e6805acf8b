"""What the host does for one stub process: responses of its requests, BLS, metrics, readiness, log lines.

Invariants: each request that was opened here is ended here: by the stub, or with an error when the stub has ended; no
message waits for a slow host (loads of other models run on their own threads). A metric lives as long as a model
version that made it: an unloaded model leaves none, a restarted instance continues counting, a reload does not start at
0.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
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
    invalid_argument,
)

from .requests import BlsRequests, Responder, bls_request, check_bls_request, state_outputs
from .stub.packets import Message
from .stub.pb_request import PackedTenant
from .stub_process import Outbox, StubProcess
from .wire_messages import execute_error, not_healthy, unpack_response, unpack_tenant

TIMEOUT_S = 5.0
FRESH_S = 0.1

log = logging.getLogger(__name__)
model_log = logging.getLogger("llmbackend.backends.python.model")

_MetricKey = tuple[str, tuple[tuple[str, str], ...]]
"""A family's name, and labels sorted by name."""


class MetricUsers:
    """How many model versions use each metric; one object per backend."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[_MetricKey] = Counter()


class ModelMetrics:
    """The metrics that one model version makes through pb_utils. Any thread."""

    def __init__(self, backend: Backend, users: MetricUsers) -> None:
        self._backend = backend
        self._users = users
        self._numbers: dict[_MetricKey, int] = {}
        self._metrics: list[tuple[MetricFamily, dict[str, str]]] = []

    def open_family(self, kind: str, name: str, description: str) -> None:
        """Raises TritonError ALREADY_EXISTS when the family is of another kind, INVALID_ARG for its name."""
        self._family(kind, name, description)

    def open(
        self, kind: str, name: str, description: str, labels: dict[str, str], buckets: Sequence[float] | None
    ) -> int:
        """Exports a metric; returns its number. Raises TritonError as `open_family`, INVALID_ARG for invalid labels or
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
        """Removes the metrics that no other model version uses."""
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
    """The result of a model's own `is_ready()`. Any thread may ask.

    The model is asked once at a time, and an answer holds for FRESH_S, so that many probes cost it little. Each caller
    is answered within TIMEOUT_S (Triton's 5 s), also when the model hangs or its process ends.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        """ask: sends the question and returns; `answer` follows."""
        self._ask = ask
        self._lock = threading.Lock()
        self._pending: Future[str] | None = None
        self._last: tuple[float, str] | None = None
        self._end: str | None = None

    def reason(self) -> str:
        """Why the model is not ready; "" when it is."""
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
        """On the thread of the stub's messages."""
        with self._lock:
            self._last = (time.monotonic(), reason)
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.set_result(reason)

    def close(self, reason: str) -> None:
        """The stub has ended."""
        with self._lock:
            self._end = reason
        self.answer(reason)


class StubServices:
    """`handle` and `abandon` are called on the thread of the stub's messages, the rest on the instance's."""

    def __init__(self, model: Model, metrics: ModelMetrics) -> None:
        self._model = model
        self._metrics = metrics
        self._states = state_outputs(model.config)
        self.process: StubProcess
        self.has_model = False
        self.tells_readiness = False
        self.is_abandoned = False
        self._outbox: Outbox
        self._bls: BlsRequests
        self._readiness: StubReadiness
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._responders: dict[int, Responder] = {}
        self._questions: dict[str, Callable[..., Any]] = {
            "metric_family": metrics.open_family,
            "metric_open": metrics.open,
            "metric_value": metrics.value,
        }
        self._slow_questions: dict[str, Callable[..., Any]] = {
            "load_model": model.load_model,
            "unload_model": model.unload_model,
            "is_model_ready": model.is_model_ready,
        }

    def connect(self, process: StubProcess) -> None:
        """To be called before the first call of the process, which sends nothing until then."""
        self.process = process
        self._outbox = process.outbox
        self._bls = BlsRequests(self._model, process.outbox)
        self._readiness = StubReadiness(partial(process.outbox.post, ("is_ready",)))

    def not_ready_reason(self) -> str:
        """Why the model is not ready; "" when it is, or has no `is_ready()`."""
        return self._readiness.reason() if self.tells_readiness else ""

    def open(self, request: Request) -> int:
        """The number of this request in the stub. If the stub has ended, the request fails."""
        responder, number = Responder(request, self._states), next(self._numbers)
        with self._lock:
            self._responders[number] = responder
        if self.is_abandoned and self.take(number) is not None:
            responder.fail(not_healthy(self.process.name, self.process.cause))
        request.on_cancel(partial(self._outbox.post, ("cancel", number)))
        return number

    def take(self, number: int) -> Responder | None:
        """Takes a request from the stub; None when the stub has ended it."""
        with self._lock:
            return self._responders.pop(number, None)

    def abandon(self, error: TritonError) -> None:
        """The stub has ended: ends its requests with `error`."""
        self.is_abandoned = True
        with self._lock:
            responders = list(self._responders.values())
            self._responders.clear()
        for responder in responders:
            responder.fail(error)
        self._readiness.close(error.message)
        self._bls.cancel_all()

    def handle(self, message: Message) -> None:
        """Raises for a malformed message."""
        (verb, *arguments), parts = message
        if verb == "response":
            self._on_response(*arguments, parts=parts)
        elif verb == "infer":
            self._on_infer(*arguments, parts=parts)
        elif verb in self._questions:
            self._reply(self._questions[verb], *arguments)
        elif verb in self._slow_questions:
            arguments = [self._slow_questions[verb], *arguments]
            threading.Thread(target=self._reply, args=arguments, name="python-control", daemon=True).start()
        else:
            getattr(self, f"_on_{verb}")(*arguments)

    def _on_response(self, number: int, packed: Any, is_last: bool, *, parts: Sequence[Any]) -> None:
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

    def _on_infer(self, number: int, is_stream: bool, fields: dict[str, Any], *, parts: Sequence[Any]) -> None:
        parent = self._responders.get(fields["parent"])  # the request whose trace the model passed
        trace = None if parent is None else parent.trace
        request = bls_request(fields, parts, trace, self._tenant_of(fields["tenants"]))
        self._bls.start(number, request, partial(check_bls_request, self._model, request, is_stream))

    def _tenant_of(self, packed: Collection[PackedTenant] | None) -> Tenant:
        """The tenant of a call; one from a thread of the model's own may be for any of the stub's requests."""
        if packed is not None:
            return common_tenant(frozenset(map(unpack_tenant, packed)))
        with self._lock:
            return common_tenant(frozenset(responder.tenant for responder in self._responders.values()))

    def _on_cancel_infer(self, number: int) -> None:
        self._bls.cancel(number)

    def _on_is_ready(self, reason: str) -> None:
        self._readiness.answer(reason)

    def _on_log(self, level: int, file: str, line: int, text: str) -> None:
        if model_log.isEnabledFor(level):
            model_log.handle(model_log.makeRecord(model_log.name, level, file, line, "%s", (text,), None))

    def _on_metric(self, number: int, action: str, value: float) -> None:
        try:
            self._metrics.change(number, action, value)
        except TritonError as error:  # where possible, the stub has refused it before
            log.error("a metric of model '%s' cannot be changed: %s", self._model.name, error)

    def _reply(self, function: Callable[..., Any], question: int, *arguments: Any) -> None:
        try:
            answer = (True, function(*arguments))
        except TritonError as error:
            answer = (False, error.message)
        except Exception as error:  # a bug; the model must not wait forever
            log.exception("a call of model '%s' to the host failed", self._model.name)
            answer = (False, f"{type(error).__name__}: {error}")
        self._outbox.post(("answer", question, answer, True))
