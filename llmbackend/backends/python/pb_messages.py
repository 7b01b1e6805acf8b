"""What a model receives and answers with: `pb_utils.InferenceRequest`, `InferenceResponse`, `TritonError`, response
sender.

For: model code. Does not know: how a response reaches the host (`responder.py` does). Invariant: a request's
tensors stay readable for as long as the model holds it, also after the host's request was released.
Source: Triton python_backend documentation; method names as listed in transcript 61.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llmbackend.core.backend_api import ErrorCode, Request, RequestFlag, ResponseFlag
from llmbackend.core.backend_api import TritonError as HostError

from .pb_tensor import Tensor
from .responder import Responder

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = int(RequestFlag.SEQUENCE_START)
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = int(RequestFlag.SEQUENCE_END)
TRITONSERVER_RESPONSE_COMPLETE_FINAL = int(ResponseFlag.FINAL)

_ERROR_CODES = tuple(ErrorCode)


def not_built(name: str) -> RuntimeError:
    return RuntimeError(f"pb_utils.{name} is not supported by llmbackend's python backend yet")


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """An exception that a model may raise; treated as any other."""


class TritonError:
    """The error of one response: `TritonError(message, code=TritonError.INTERNAL)`. Not an exception, as in Triton."""

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in range(len(_ERROR_CODES)):
            raise ValueError(f"TritonError code must be one of TritonError's codes 0 to 7, got {code!r}")
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def to_host(self) -> HostError:
        return HostError(self._message, _ERROR_CODES[self._code])


class InferenceResponse:
    """Output tensors, or an error. `parameters`: a dict of str, bool, int and float values, or its JSON text."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | str | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors of an InferenceResponse must be Tensors, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error of an InferenceResponse must be a TritonError, got {type(error).__name__}")
        self._output_tensors = list(output_tensors)
        self._error = error
        self.host_parameters = _checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self.host_parameters)


def _checked_parameters(parameters: Mapping[str, Any] | str | None) -> dict[str, str | int | bool | float]:
    fields = json.loads(parameters) if isinstance(parameters, str) and parameters else parameters or {}
    if not isinstance(fields, Mapping):
        raise TypeError(f"parameters of an InferenceResponse must be a dict, got {type(fields).__name__}")
    for name, value in fields.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float):
            raise TypeError(
                f"parameter {name!r} of an InferenceResponse must be a str, bool, int or float, "
                f"got {type(value).__name__}"
            )
    return dict(fields)


class InferenceResponseSender:
    """Sends the responses of one request, from any thread: `send(response, flags)` or `send(flags=flags)`."""

    def __init__(self, responder: Responder) -> None:
        self.responder = responder

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send takes an InferenceResponse, got {type(response).__name__}")
        send_through(self.responder, response, flags)

    def is_cancelled(self) -> bool:
        return self.responder.is_cancelled


def send_through(responder: Responder, response: InferenceResponse | None, flags: int) -> None:
    """Hands a model's response to the host; `response` None is a flags-only completion."""
    if response is None:
        responder.send_flags(flags)
        return
    error = response.error()
    responder.send(
        [tensor.host for tensor in response.output_tensors()],
        response.host_parameters,
        error.to_host() if error else None,
        flags,
    )


class InferenceRequest:
    """What a model sees of a request. A model cannot make one: calling other models (BLS) is not built."""

    _inputs: list[Tensor]
    responder: Responder

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise not_built("InferenceRequest (business logic scripting: calling another model)")

    @classmethod
    def of(cls, request: Request, responder: Responder, model_name: str, model_version: int) -> InferenceRequest:
        """Copies what the model may ask for, so that the host's request can be released early."""
        made = cls.__new__(cls)
        made._inputs = [Tensor.wrap(tensor) for tensor in request.inputs.values()]
        made.responder = responder
        made._request_id = request.id
        made._correlation_id = request.correlation_id
        made._flags = int(request.flags)
        made._timeout_us = request.timeout_us
        made._parameters = json.dumps(dict(request.parameters))
        made._requested_outputs = set(request.requested_outputs)
        made._model = (model_name, model_version)
        return made

    _request_id: str
    _correlation_id: int | str
    _flags: int
    _timeout_us: int
    _parameters: str
    _requested_outputs: set[str]
    _model: tuple[str, int]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def timeout(self) -> int:
        """Microseconds, 0 when the client set none."""
        return self._timeout_us

    def parameters(self) -> str:
        """A JSON object, in the client's order."""
        return self._parameters

    def requested_output_names(self) -> set[str]:
        return self._requested_outputs

    def model_name(self) -> str:
        return self._model[0]

    def model_version(self) -> int:
        return self._model[1]

    def is_cancelled(self) -> bool:
        return self.responder.is_cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        return InferenceResponseSender(self.responder)

    def exec(self, *_args: Any, **_kwargs: Any) -> None:
        raise not_built("InferenceRequest.exec")

    def async_exec(self, *_args: Any, **_kwargs: Any) -> None:
        raise not_built("InferenceRequest.async_exec")

    def set_release_flags(self, *_args: Any) -> None:
        raise not_built("InferenceRequest.set_release_flags (iterative sequences)")

    def set_flags(self, *_args: Any) -> None:
        raise not_built("InferenceRequest.set_flags")

    def trace(self) -> None:
        raise not_built("InferenceRequest.trace")
