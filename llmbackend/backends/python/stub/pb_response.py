"""`pb_utils.InferenceResponse`, and the check of the parameters that a model gives a request or a response.

For: model code; what it sends, and what other models answer to it. Does not know: how a response reaches the host.
Invariant: parameters hold plain str, bool, int and float values alone; a model sets no float, as in Triton, but may see
one of another backend's.
Source: Triton python_backend documentation, PyParametersToJSON and their texts; the limit of 64 bits is checked here,
where Triton fails later.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from typing import Any

from .errors import PackedError, TritonError, TritonModelException
from .pb_tensor import PackedTensor, Tensor

ParameterValue = str | int | bool | float
_INT64_BITS = 63

PackedResponse = tuple[list[PackedTensor], dict[str, ParameterValue], PackedError | None]


def checked_parameters(given: dict[str, Any] | None) -> dict[str, ParameterValue]:
    """Raises TritonModelException for another type than bool, int and str."""
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
    """Output tensors, or an error. `parameters`: a dict of str, bool and int values."""

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
        """With the outputs that the client wants; none beside an error."""
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
