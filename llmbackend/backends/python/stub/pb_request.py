"""`pb_utils.InferenceRequest`: a request that a model receives, or creates to call another model.

Invariants: a request's tensors remain readable as long as the model references it, even after the host's request was
released; a call of another model is made on behalf of the tenants of its execute call.
Source: Triton python_backend documentation; method names as listed in golden transcript 61.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from .bls_call import BlsCall, ResponseIterator, only_response_of, responses_of
from .errors import TritonModelException, integer, text
from .host_link import host
from .pb_response import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    Exchange,
    InferenceResponse,
    InferenceResponseSender,
    checked_parameters,
)
from .pb_tensor import PackedTensor, Tensor

PackedTenant = tuple[str, bool, str] | None
"""None = NO_TENANT."""

EXECUTE_TENANTS: Final[ContextVar[frozenset[PackedTenant] | None]] = ContextVar("execute_tenants", default=None)
"""The tenants of the requests in this execute call; None outside of one."""


class MemoryType:
    TRITONSERVER_MEMORY_CPU: Final = 0
    TRITONSERVER_MEMORY_GPU: Final = 2


_MEMORY_DEFAULT = -1
_MAX_UINT32, _MAX_INT64, _MAX_UINT64 = (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1
PackedFields = tuple[str, int | str, int, int, dict[str, Any], Sequence[PackedTensor], str | None, PackedTenant]
"""Id, correlation id, flags, timeout in microseconds, parameters, inputs, trace context, tenant."""
PackedRequest = tuple[int, Sequence[str], PackedFields]
"""The host's id of the request, the requested outputs, and the fields that models can read."""
_PHASES_WITHOUT_BLS = ("load", "auto_complete", "initialize", "finalize")


@dataclass(frozen=True)
class PreferredMemory:
    """The requested location of another model's outputs. Has no effect: outputs are always in CPU memory."""

    preferred_memory_type: int = _MEMORY_DEFAULT
    preferred_device_id: int = 0


@dataclass(frozen=True)
class InferenceTrace:
    """Passes the trace of a request to one made on its behalf: `InferenceRequest(..., trace=request.trace())`. It also
    identifies the tenant, which the host cannot know if a batch has requests from several clients."""

    context: str | None = None
    request_number: int | None = None
    _tenant: PackedTenant = None

    def get_context(self) -> str | None:
        """The OpenTelemetry context of a traced request as the JSON text of its headers; None if it is not traced."""
        return self.context


class InferenceRequest:
    """Keyword arguments as in Triton; `model_name`, `requested_output_names` and `inputs` are required."""

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str | bytes] | None = None,
        model_name: str | bytes | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("an InferenceRequest needs inputs, requested_output_names and model_name")
        if preferred_memory is not None and not isinstance(preferred_memory, PreferredMemory):
            raise TypeError(f"preferred_memory must be a PreferredMemory, got {type(preferred_memory).__name__}")
        self._request_id = text(request_id, "request_id")
        self._correlation_id = _correlation_id(correlation_id)
        self._model = (
            text(model_name, "model_name"),
            integer(model_version, "model_version", -1, _MAX_INT64),
        )
        owner = f"request with id '{self._request_id}' and model name '{self._model[0]}'"
        self._inputs = [_input(tensor, owner) for tensor in inputs]
        names = {text(name, "requested_output_names") for name in requested_output_names}
        if "" in names:
            raise TritonModelException(f"Requested output name for {owner} should not be empty.")
        self._requested_outputs: Sequence[str] = list(names)
        self._flags = integer(flags, "flags", 0, _MAX_UINT32)
        self._timeout_us = integer(timeout, "timeout", 0, _MAX_UINT64)
        self._trace: InferenceTrace | None = trace or InferenceTrace()
        self._trace_context: str | None = None
        self._tenant: PackedTenant = None
        self._parameters = checked_parameters(parameters)
        self._exchange: Exchange | None = None

    @classmethod
    def _received(
        cls,
        fields: PackedFields,
        wanted: Sequence[str],
        parts: Sequence[Any],
        model: tuple[str, int],
        exchange: Exchange,
    ) -> InferenceRequest:
        """A request from the host."""
        request = cls.__new__(cls)
        (
            request._request_id,
            request._correlation_id,
            request._flags,
            request._timeout_us,
            request._parameters,
            inputs,
            request._trace_context,
            request._tenant,
        ) = fields
        request._inputs = [Tensor._unpack(tensor, parts) for tensor in inputs]
        request._requested_outputs = wanted
        request._model = model
        request._trace = None
        request._exchange = exchange
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = integer(flags, "flags", 0, _MAX_UINT32)

    def timeout(self) -> int:
        """Microseconds; 0 = none."""
        return self._timeout_us

    def parameters(self) -> str:
        """A JSON object, in the client's order."""
        return json.dumps(self._parameters)

    def requested_output_names(self) -> set[str]:
        return set(self._requested_outputs)

    def model_name(self) -> str:
        return self._model[0]

    def model_version(self) -> int:
        return self._model[1]

    def trace(self) -> InferenceTrace:
        if self._trace is None:  # few models ask for it
            self._trace = InferenceTrace(self._trace_context, self._own_exchange("trace").number, self._tenant)
        return self._trace

    def is_cancelled(self) -> bool:
        return self._exchange is not None and self._exchange.is_cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        return InferenceResponseSender(self._own_exchange("get_response_sender"))

    def set_release_flags(self, flags: int) -> None:
        """RESCHEDULE returns the request to its iterative sequence batcher when execute returns."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(f"Unable to set release flags. Unsupported flag provided: {flags!r}.")
        self._own_exchange("set_release_flags").release_flags = flags

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Runs the request on its model; blocks until the response. decoupled: returns an iterator of responses."""
        call = self._start(decoupled)
        return ResponseIterator(call) if decoupled else call.only_response()

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """Like `exec`, but awaitable; the request is sent before this returns. decoupled: the iterator is returned with
        the first response, so that a `for` does not block other coroutines while waiting for it."""
        import asyncio  # imported only by models that await

        loop = asyncio.get_running_loop()
        call = self._start(decoupled)
        return responses_of(call, loop) if decoupled else only_response_of(call, loop)

    def _start(self, is_stream: bool) -> BlsCall:
        link = host("InferenceRequest.exec")
        if link.phase in _PHASES_WITHOUT_BLS:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        parts: list[Any] = []
        trace = self.trace()
        fields = {
            "id": self._request_id,
            "correlation_id": self._correlation_id,
            "inputs": [tensor._pack(parts) for tensor in self._inputs],
            "outputs": self._requested_outputs,
            "model": self._model,
            "flags": self._flags,
            "timeout_us": self._timeout_us,
            "parameters": self._parameters,
            "parent": trace.request_number,
            "tenants": EXECUTE_TENANTS.get() if trace.request_number is None else frozenset([trace._tenant]),
        }
        return BlsCall(link, fields, parts, is_stream)

    def _own_exchange(self, asked_for: str) -> Exchange:
        if self._exchange is None:
            raise TritonModelException(f"{asked_for} applies to requests that this model received, not that it made")
        return self._exchange


def _correlation_id(value: int | str) -> int | str:
    if isinstance(value, str):
        return str(value)
    if value is None:
        raise TypeError("correlation_id must be int or str, got NoneType")
    if not hasattr(value, "__index__"):
        raise TritonModelException("Correlation ID must be integer or string")
    return integer(value, "correlation_id", 0, _MAX_UINT64)


def _input(tensor: Tensor, owner: str) -> Tensor:
    if tensor is None:
        raise TritonModelException(f"Input tensor for {owner} should not be empty.")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"inputs of an InferenceRequest must be Tensors, got {type(tensor).__name__}")
    return tensor
