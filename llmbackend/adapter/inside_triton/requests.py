"""Requests, responses and response factories of the backend contract, as thin handles on those of pb_utils.

For: the adapter, which sees `core.backend_api` and nothing else. Does not know: LLMs. Invariant: after `release` no
input of Triton's is touched; a request that cannot be read is answered, and does not reach the adapter.
Differences that pb_utils forces: a request's priority is not known here (Triton's own queue has ordered it), and
statistics are reported by Triton's python backend itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from llmbackend.core.backend_api import (
    NO_TENANT,
    ParameterValue,
    ReleaseFlag,
    RequestFlag,
    ResponseFlag,
    Tensor,
    TritonError,
)

from .channel import CancelWatch, Channel


class TritonRequest:
    """One inference request."""

    priority = 0
    trace = None
    """Triton traces by itself; nothing here hands a trace on."""
    tenant = NO_TENANT
    """Triton knows no clients."""

    def __init__(self, request: Any, channel: Channel, watch: CancelWatch) -> None:
        """Reads everything at once. Raises TritonError for a tensor that it does not know."""
        self.id: str = request.request_id()
        self.correlation_id: int | str = request.correlation_id()
        self.flags = RequestFlag(request.flags() & (RequestFlag.SEQUENCE_START | RequestFlag.SEQUENCE_END))
        self.timeout_us = int(request.timeout())
        self.parameters: Mapping[str, ParameterValue] = _parameters(request.parameters())
        self.requested_outputs = tuple(sorted(request.requested_output_names()))
        self.inputs: Mapping[str, Tensor] = {
            tensor.name(): Tensor.of(tensor.name(), tensor.as_numpy()) for tensor in request.inputs()
        }
        self._request = request  # owns the shared memory that the inputs lie in
        self._channel = channel
        self._watch = watch

    @property
    def is_cancelled(self) -> bool:
        return self._channel.ask_cancelled()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._watch.add(self._channel, callback)

    def new_response(self) -> TritonResponse:
        return TritonResponse(self._channel)

    def response_factory(self) -> TritonResponseFactory:
        return TritonResponseFactory(self._channel)

    def release(self, flags: ReleaseFlag = ReleaseFlag.ALL) -> None:
        self._watch.discard(self._channel)
        self.inputs = {}
        self._request = None


class TritonResponse:
    """One response under construction."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._tensors: list[Tensor] = []
        self._parameters: dict[str, ParameterValue] = {}

    def add_output(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)

    def set_parameter(self, name: str, value: ParameterValue) -> None:
        self._parameters[name] = value

    def send(self, flags: ResponseFlag = ResponseFlag.NONE, error: TritonError | None = None) -> None:
        self._channel.send(self._made(error), flags)

    def _made(self, error: TritonError | None) -> Any:
        if error is not None:
            return error_response(error)
        tensors = [pb_utils.Tensor(tensor.name, tensor.data) for tensor in self._tensors]
        if not self._parameters:
            return pb_utils.InferenceResponse(output_tensors=tensors)
        return pb_utils.InferenceResponse(output_tensors=tensors, parameters=json.dumps(self._parameters))


class TritonResponseFactory:
    """Makes the responses of one request after its release."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def is_cancelled(self) -> bool:
        return self._channel.ask_cancelled()

    def new_response(self) -> TritonResponse:
        return TritonResponse(self._channel)

    def send_flags(self, flags: ResponseFlag) -> None:
        self._channel.send(None, flags)

    def close(self) -> None:
        """Triton's factory goes with the last reference to its sender."""


def error_response(error: TritonError) -> Any:
    code = getattr(pb_utils.TritonError, error.code.name)
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(error.message, code))


def _parameters(parameters: Any) -> dict[str, ParameterValue]:
    """JSON text in the releases so far."""
    values = json.loads(parameters) if isinstance(parameters, str) else parameters
    return dict(values or {})
