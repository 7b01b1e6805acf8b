"""What the host does for one stub process: its requests' answers, inferences on other models, metrics, log lines.

For: ModelState, which makes one for each stub process; the instance hands it the requests of each execute call. Does
not know: how the process is started or ends. Owner of the requests that the stub has. Invariants: each request that was
opened here is ended here: by the stub, or, when that has ended, with an error that says so; no message waits for a slow
host (loads of other models run on threads of their own); a model's `is_ready` is asked once at a time.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from llmbackend.core.backend_api import Model, Request, Tenant, TritonError, common_tenant

from .bls_requests import BlsRequests
from .custom_metrics import ModelMetrics
from .responder import Responder, state_outputs
from .stub.packets import Message
from .stub.pb_request import PackedTenant
from .stub_process import Outbox, StubProcess
from .wire_messages import execute_error, not_healthy, unpack_response, unpack_tenant

TIMEOUT_S = 5.0
FRESH_S = 0.1

log = logging.getLogger(__name__)
model_log = logging.getLogger("llmbackend.backends.python.model")


class StubReadiness:
    """What a model's own `is_ready()` says, asked of its stub process. Any thread may ask.

    The model is asked one question at a time, and an answer holds for FRESH_S, so that many probes cost it little. Each
    caller is answered within TIMEOUT_S, also when the model hangs or its process ends. Source: user-defined
    `is_ready()` of Triton's python backend, and its 5 s.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` sends the question and returns at once; `answer` follows."""
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
    """`handle` and `abandon` come from the thread of the stub's messages, the rest from the instance's."""

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

    def connect(self, process: StubProcess) -> None:
        """Call it before the process is called for the first time; until then that sends nothing."""
        self.process = process
        self._outbox = process.outbox
        self._bls = BlsRequests(self._model, process.outbox)
        self._readiness = StubReadiness(partial(process.outbox.post, ("is_ready",)))

    def not_ready_reason(self) -> str:
        """Why the model's own `is_ready()` denies it; "" when it is ready or has no such function."""
        return self._readiness.reason() if self.tells_readiness else ""

    def open(self, request: Request) -> int:
        """The number under which the stub gets this request; the request of a stub that has ended fails at once."""
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
        """The stub has ended: so do its requests, with `error`."""
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
        parent = self._responders.get(fields["parent"])  # the request whose trace the model passed on
        trace = None if parent is None else parent.trace
        self._bls.start(number, is_stream, fields, parts, trace, self._tenant_of(fields["tenants"]))

    def _tenant_of(self, packed: Collection[PackedTenant] | None) -> Tenant:
        """The tenant that a call is made for. One from a thread of the model may be for any request that it has."""
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

    def _on_metric_family(self, question: int, *arguments: Any) -> None:
        self._reply(question, self._metrics.open_family, *arguments)

    def _on_metric_open(self, question: int, *arguments: Any) -> None:
        self._reply(question, self._metrics.open, *arguments)

    def _on_metric_value(self, question: int, number: int) -> None:
        self._reply(question, self._metrics.value, number)

    def _on_load_model(self, question: int, name: str, parameters: dict[str, str | bytes]) -> None:
        self._reply_later(question, self._model.load_model, name, parameters)

    def _on_unload_model(self, question: int, name: str, unload_dependents: bool) -> None:
        self._reply_later(question, self._model.unload_model, name, unload_dependents)

    def _on_is_model_ready(self, question: int, name: str, version: int) -> None:
        self._reply_later(question, self._model.is_model_ready, name, version)

    def _reply(self, question: int, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            answer = (True, function(*arguments))
        except TritonError as error:
            answer = (False, error.message)
        except Exception as error:  # a bug; the model must not wait forever
            log.exception("a call of model '%s' to the host failed", self._model.name)
            answer = (False, f"{type(error).__name__}: {error}")
        self._outbox.post(("answer", question, answer, True))

    def _reply_later(self, question: int, function: Callable[..., Any], *arguments: Any) -> None:
        thread = threading.Thread(target=self._reply, args=(question, function, *arguments), name="python-control")
        thread.daemon = True
        thread.start()
