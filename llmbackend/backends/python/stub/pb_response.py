"""`pb_utils.InferenceResponse`.

For: model code; what it sends, and what other models answer to it. Does not know: how a response reaches the host.
Invariant: parameters hold plain str, bool, int and float values alone. Source: Triton python_backend documentation.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from .errors import PackedError, TritonError
from .pb_tensor import Tensor
from .tensor_wire import PackedTensor

ParameterValue = str | int | bool | float
PackedResponse = tuple[list[PackedTensor], dict[str, ParameterValue], PackedError | None]
_PLAIN_TYPES: tuple[type[Any], ...] = (bool, int, float, str)


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
        self._parameters = plain_parameters(parameters, "InferenceResponse") if parameters else {}

    @classmethod
    def _unpack(cls, packed: PackedResponse, parts: Sequence[Any]) -> InferenceResponse:
        outputs, parameters, error = packed
        tensors = [Tensor._unpack(tensor, parts) for tensor in outputs]
        return cls(tensors, None if error is None else TritonError(error[1], error[0]), parameters)

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


def plain_parameters(parameters: Mapping[str, Any] | str | None, owner: str) -> dict[str, ParameterValue]:
    """Raises TypeError for a key or value of another type. Subclasses, such as numpy's floats, become plain."""
    fields = json.loads(parameters) if isinstance(parameters, str) and parameters else parameters or {}
    if not isinstance(fields, Mapping):
        raise TypeError(f"parameters of an {owner} must be a dict, got {type(fields).__name__}")
    plain = {}
    for name, value in fields.items():
        kind = next((kind for kind in _PLAIN_TYPES if isinstance(value, kind)), None)
        if not isinstance(name, str) or kind is None:
            raise TypeError(
                f"parameter {name!r} of an {owner} must be a str, bool, int or float, got {type(value).__name__}"
            )
        plain[str(name)] = kind(value)
    return plain
