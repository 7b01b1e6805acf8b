"""`pb_utils.InferenceResponse` and `InferenceResponseSender`, and the check of parameters.

Invariants: nothing is sent after FINAL; a request's end is reported to the host exactly once, even if the model drops
the request, so that no client waits forever. As in Triton, models can set parameters of type str, bool and int; float
parameters from other backends can be read.
Source: Triton python_backend documentation, PyParametersToJSON, Triton's response sender, and their texts; the 64-bit
limit is checked here, whereas Triton fails later.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Container, Sequence
from typing import Any

from .errors import PackedError, TritonError, TritonModelException
from .host_link import HostLink
from .pb_tensor import PackedTensor, Tensor

FINAL = 1
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2
_PREFIX = "Unable to send response. "
ParameterValue = str | int | bool | float
_INT64_BITS = 63

PackedResponse = tuple[list[PackedTensor], dict[str, ParameterValue], PackedError | None]


def checked_parameters(given: dict[str, Any] | None) -> dict[str, ParameterValue]:
    """Raises TritonModelException for any type other than bool, int and str."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise TritonModelException(f"Expect dict, got {type(given)}")
    plain: dict[str, ParameterValue] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        plain[str(name)] = _checked_value(name, value)
    return plain


def _checked_value(name: str, value: Any) -> ParameterValue:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if not isinstance(value, int):
        raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    if not -(1 << _INT64_BITS) <= value < 1 << _INT64_BITS:
        raise TritonModelException(f"Expect parameter '{name}' to fit into 64 bits, got {value}")
    return int(value)


class InferenceResponse:
    """Output tensors, or an error, and parameters of type str, bool or int."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors of an InferenceResponse must be Tensors, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error of an InferenceResponse must be a TritonError, got {type(error).__name__}")
        self._output_tensors = list(output_tensors)
        self._error = error
        self._parameters = checked_parameters(parameters)

    @classmethod
    def _unpack(cls, packed: PackedResponse, parts: Sequence[Any]) -> InferenceResponse:
        outputs, parameters, error = packed
        tensors = [Tensor._unpack(tensor, parts) for tensor in outputs]
        response = cls(tensors, None if error is None else TritonError(error[1], error[0]))
        response._parameters = parameters
        return response

    def _pack(self, wanted: Container[str], parts: list[Any]) -> PackedResponse:
        """The response with the `wanted` outputs; without outputs if it has an error."""
        if self._error is not None:
            return [], self._parameters, (self._error.code(), self._error.message())
        outputs = [tensor._pack(parts) for tensor in self._output_tensors if tensor._name in wanted]
        return outputs, self._parameters, None

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)


class Exchange:
    """The responses of one request: what its sender and the end of `execute` may still send. Any thread may send.

    output_names: the outputs to send: the requested ones, and the states of the request's sequence
    """

    __slots__ = (
        "_decoupled", "_is_cancelled", "_is_closed", "_is_over", "_link", "_lock", "number", "output_names",
        "release_flags",
    )  # fmt: skip

    def __init__(
        self, link: HostLink, number: int, wanted: Sequence[str], states: frozenset[str], decoupled: bool
    ) -> None:
        self.number = number
        self.release_flags = RELEASE_ALL
        self._link = link
        self.output_names: Container[str] = states.union(wanted) if states else wanted
        self._decoupled = decoupled
        self._lock = threading.RLock()
        self._is_closed = False  # the model has sent FINAL
        self._is_cancelled = False  # set at the end
        self._is_over = False  # the end has been reported to the host, or will be by the runner
        link.cancellations.begin(number)

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled or self._link.cancellations.is_requested(self.number)

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Raises TritonModelException if the response may not be sent."""
        if flags not in (0, FINAL):
            raise TritonModelException(f"{_PREFIX}Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        with self._lock:
            self._check(has_response=response is not None)
            self._is_closed = flags == FINAL
            if response is not None:
                is_last = self._is_closed or not self._decoupled
                self._post_response(response, is_last)
            elif not self._is_over:
                self._end()
                self._link.post(("final", self.number))

    def check_response(self) -> None:
        """Checks a response that execute returned. Raises TritonModelException if it may not be sent."""
        with self._lock:
            self._check(has_response=True)

    def end_by_runner(self) -> None:
        """The runner reports the end unless the model has done so."""
        with self._lock:
            self._is_closed = True
            if not self._is_over:
                self._end()

    def fail(self, text: str) -> None:
        """Ends the request with an error, unless it is over."""
        with self._lock:
            self._is_closed = True
            if not self._is_over:
                self._end()
                self._link.post(("failed", self.number, text))

    def _check(self, *, has_response: bool) -> None:
        if self._is_closed:
            raise TritonModelException(f"{_PREFIX}Response sender has been closed.")
        if self._decoupled:
            return
        if has_response and self._is_over:
            raise TritonModelException(f"{_PREFIX}Non-decoupled model cannot send more than one response.")
        if not has_response and not self._is_over:
            raise TritonModelException(
                f"{_PREFIX}Non-decoupled model cannot send complete final before sending a response."
            )

    def _post_response(self, response: InferenceResponse, is_last: bool) -> None:
        parts: list[object] = []
        packed = response._pack(self.output_names, parts)
        if is_last:
            self._end()
        self._link.post(("response", self.number, packed, is_last), parts)

    def _end(self) -> None:
        self._is_over = True
        self._is_cancelled = self._link.cancellations.end(self.number)

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self._end()
            with contextlib.suppress(OSError):
                self._link.post(("dropped", self.number))


class InferenceResponseSender:
    """Sends the responses of one request, from any thread: `send(response, flags)` or `send(flags=flags)`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send takes an InferenceResponse, got {type(response).__name__}")
        self._exchange.send(response, flags)

    def is_cancelled(self) -> bool:
        return self._exchange.is_cancelled
