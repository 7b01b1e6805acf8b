"""The requests of one stub process: those that it executes, and those that its model sends to other models (BLS).

Invariants: a request gets at most one FINAL and nothing after it; the host ends a request whose factory is closed
without FINAL. Each BLS call of a stub gets exactly one last answer; when the stub has ended, its calls are cancelled
and further answers dropped. Nothing here blocks, because responses arrive on other models' threads.
Source: python_backend's request executor; its texts for models that are not ready or are decoupled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llmbackend.core.backend_api import (
    InferenceHandle,
    InferenceRequest,
    InferenceResponse,
    Model,
    ModelConfig,
    ParameterValue,
    Request,
    RequestFlag,
    RequestTrace,
    ResponseFactory,
    ResponseFlag,
    Tenant,
    Tensor,
    TritonError,
    internal,
)

from .stub_process import Outbox
from .wire_messages import pack_response, unpack_tensor

PackResponse = Callable[[InferenceResponse, list[Any]], Any]
"""Converts the response to a plain value, and appends large data to the list."""


def state_outputs(config: ModelConfig) -> frozenset[str]:
    """The names of the outputs that are sequence states."""
    return frozenset(state.output_name for state in config.sequence_batching.state)


class Responder:
    """Owns the response factory of one request. Thread-safe."""

    def __init__(self, request: Request, states: frozenset[str] = frozenset()) -> None:
        self._factory: ResponseFactory = request.response_factory()
        self.trace = request.trace
        self.tenant = request.tenant
        self._states = states
        self._request = request if states else None
        self._lock = threading.Lock()
        self._is_over = False

    def send(
        self,
        outputs: Sequence[Tensor],
        parameters: Mapping[str, ParameterValue],
        error: TritonError | None,
        *,
        is_last: bool,
    ) -> None:
        """Does nothing if the request is over."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = is_last
            if self._request is not None:
                outputs, error = self._set_states(self._request, outputs, error)
            try:
                response = self._factory.new_response()
                for tensor in outputs:
                    response.add_output(tensor)
                for name, value in parameters.items():
                    response.set_parameter(name, value)
                response.send(ResponseFlag.FINAL if is_last else ResponseFlag.NONE, error)
            finally:
                if is_last:
                    self._factory.close()

    def _set_states(
        self, request: Request, outputs: Sequence[Tensor], error: TritonError | None
    ) -> tuple[Sequence[Tensor], TritonError | None]:
        """Sets the states among the outputs. Returns the outputs for the client, and `error` or the error of a state
        that cannot be set because the request was released (a decoupled model may answer late)."""
        try:
            for tensor in outputs:
                if tensor.name in self._states:
                    request.new_state(tensor).update()
        except TritonError as problem:
            return (), error or problem
        wanted = request.requested_outputs
        return [tensor for tensor in outputs if tensor.name not in self._states or tensor.name in wanted], error

    def fail(self, error: TritonError) -> None:
        """Ends the request with `error`, unless it is over."""
        self.send((), {}, error, is_last=True)

    def finish(self) -> None:
        """Sends FINAL without a response."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                try:
                    self._factory.send_flags(ResponseFlag.FINAL)
                finally:
                    self._factory.close()

    def abandon(self) -> None:
        """Closes the factory without FINAL."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._factory.close()


class BlsRequests:
    """`start`, `cancel` and `cancel_all` are called on the thread of the stub's messages."""

    def __init__(self, model: Model, outbox: Outbox, pack: PackResponse = pack_response) -> None:
        self._model = model
        self._outbox = outbox
        self._pack = pack
        self._lock = threading.Lock()
        self._handles: dict[int, InferenceHandle | None] = {}

    def start(self, number: int, request: InferenceRequest, check: Callable[[], None] = lambda: None) -> None:
        """check: raises the TritonError with which to refuse the request"""
        with self._lock:
            self._handles[number] = None
        try:
            check()
            handle = self._model.infer_async(request, partial(self._answer, number))
        except TritonError as error:
            refusal = InferenceResponse(request.model_name, request.model_version, request.id, error=error)
            self._end(number, self._pack(refusal, []))
            return
        with self._lock:
            if number in self._handles:  # it has not ended yet
                self._handles[number] = handle

    def cancel(self, number: int) -> None:
        with self._lock:
            handle = self._handles.get(number)
        if handle is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        """Called when the stub has ended."""
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            if handle is not None:
                handle.cancel()

    def _answer(self, number: int, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        parts: list[Any] = []
        packed = None if response is None else self._pack(response, parts)
        if flags & ResponseFlag.FINAL:
            self._end(number, packed, parts)
        else:
            self._outbox.post(("answer", number, packed, False), parts)

    def _end(self, number: int, packed: Any, parts: Sequence[Any] = ()) -> None:
        with self._lock:
            del self._handles[number]
        self._outbox.post(("answer", number, packed, True), parts)


def check_bls_request(model: Model, request: InferenceRequest, is_stream: bool) -> None:
    """Raises TritonError INTERNAL like python_backend."""
    name = request.model_name
    try:
        is_decoupled = model.is_decoupled(name, request.model_version)
    except TritonError:
        raise internal(f"Failed for execute the inference request. Model '{name}' is not ready.") from None
    if is_decoupled and not is_stream:
        raise internal(
            f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
            "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
            "calls for decoupled models.'"
        )


def bls_request(
    fields: dict[str, Any], parts: Sequence[Any], trace: RequestTrace | None, tenant: Tenant
) -> InferenceRequest:
    name, version = fields["model"]
    return InferenceRequest(
        model_name=name,
        inputs=tuple(unpack_tensor(tensor, parts) for tensor in fields["inputs"]),
        model_version=version,
        id=fields["id"],
        requested_outputs=tuple(fields["outputs"]),
        parameters=fields["parameters"],
        correlation_id=fields["correlation_id"],
        flags=RequestFlag(fields["flags"]),
        timeout_us=fields["timeout_us"],
        trace=trace,
        tenant=tenant,
    )
