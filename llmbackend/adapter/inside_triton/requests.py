"""Requests, responses and response factories of the backend contract, on top of pb_utils.

For: the adapter, which sees `core.backend_api` and nothing else. Does not know: LLMs. Invariants: nothing is sent after
FINAL; pb_utils is not asked about a request once its FINAL is on its way; after `release` no input of Triton's is used.
Source: python_backend's response_sender.cc and pb_cancel.cc.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
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

logger = logging.getLogger(__name__)
_NUMBERS = itertools.count(1)


class Channel:
    """A response sender of pb_utils for several threads. `_lock`: its calls never overlap."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._is_final = False

    def send(self, response: Any | None, flags: ResponseFlag) -> None:
        """Blocks until Triton has taken it (the stub waits for its parent process). Raises what pb_utils raises; for
        the final response, after which nothing more can be done, it logs instead."""
        is_final = bool(flags & ResponseFlag.FINAL)
        with self._lock:
            if self._is_final:
                logger.error("a response after the final one is dropped")
                return
            self._is_final = is_final
            try:
                self._send(response, is_final)
            except Exception:
                if not is_final:
                    raise
                logger.exception("Triton did not accept the last response of a request")

    def ask_cancelled(self) -> bool:
        """Whether the request was cancelled; False after FINAL. A round trip to Triton's process."""
        with self._lock:
            return not self._is_final and bool(self._sender.is_cancelled())

    def _send(self, response: Any | None, is_final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        if response is None:
            self._sender.send(flags=flags)
        else:
            self._sender.send(response, flags)


class CancelWatch:
    """The live requests with cancel callbacks. Any thread adds and discards, one thread asks.

    It does not ask about a request whose FINAL is on its way: the stub asks by address, and Triton's side may be gone.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called when there is a request to ask about."""
        self._wake = wake
        self._lock = threading.Lock()
        self._callbacks: dict[Channel, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, channel: Channel, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks.setdefault(channel, []).append(callback)
        self._wake()

    def discard(self, channel: Channel) -> None:
        with self._lock:
            self._callbacks.pop(channel, None)

    def ask_all(self) -> None:
        """Asks Triton about each request, and calls the callbacks of the cancelled ones, once."""
        with self._lock:
            channels = list(self._callbacks)
        for channel in channels:
            if channel.ask_cancelled():
                with self._lock:
                    callbacks = self._callbacks.pop(channel, [])
                for callback in callbacks:
                    callback()


class TritonRequest:
    """One inference request.

    Different from the host's, because of pb_utils: its priority is not known (Triton's own queue has ordered it), and
    Triton's python backend reports statistics itself.
    """

    priority = 0
    trace = None
    """Triton traces requests itself."""
    tenant = NO_TENANT
    """Triton does not identify clients."""
    resume = None
    """Triton has no resumable requests."""

    def __init__(self, request: Any, channel: Channel, watch: CancelWatch) -> None:
        """Reads everything at once. Raises TritonError for a tensor of an unknown type."""
        self.id: str = request.request_id()
        self.number = next(_NUMBERS)
        self.correlation_id: int | str = request.correlation_id()
        self.flags = RequestFlag(request.flags() & (RequestFlag.SEQUENCE_START | RequestFlag.SEQUENCE_END))
        self.timeout_us = int(request.timeout())
        self.parameters: Mapping[str, ParameterValue] = _request_parameters(request.parameters())
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

    def send(
        self, flags: ResponseFlag = ResponseFlag.NONE, error: TritonError | None = None, delta: bytes = b""
    ) -> None:
        self._channel.send(self._response(error), flags)

    def _response(self, error: TritonError | None) -> Any:
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

    def send(self, outputs: Sequence[Tensor], flags: ResponseFlag = ResponseFlag.NONE, delta: bytes = b"") -> None:
        response = TritonResponse(self._channel)
        for tensor in outputs:
            response.add_output(tensor)
        response.send(flags)

    def send_flags(self, flags: ResponseFlag) -> None:
        self._channel.send(None, flags)

    def close(self) -> None:
        """Triton's factory is freed with the last reference to its sender."""


def error_response(error: TritonError) -> Any:
    code = getattr(pb_utils.TritonError, error.code.name)
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(error.message, code))


def _request_parameters(parameters: Any) -> dict[str, ParameterValue]:
    """pb_utils gives JSON text in the releases so far."""
    values = json.loads(parameters) if isinstance(parameters, str) else parameters
    return dict(values or {})
