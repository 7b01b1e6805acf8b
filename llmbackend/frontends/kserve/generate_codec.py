"""The flat JSON objects of the generate extension: keys to tensors and parameters, and responses back to keys.

For: generate and generate_stream. Does not know: HTTP, the event loop. Invariant: every key of a request becomes
exactly one input tensor, one parameter, or the request's id; none is dropped.
Source: Triton's generate extension (ExactMappingInput, ExactMappingOutput), texts as recorded from Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.errors import TritonError, internal, invalid_argument, request_tag
from llmbackend.core.messages import (
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    TensorMetadata,
)
from llmbackend.core.requests.request_bounds import MAX_PARAMETERS, check_count, check_id
from llmbackend.core.tensors import Tensor

from ..http.json_reader import as_object, as_string, dump, parse, parsing, repeated_keys
from .infer_codec import flatten, has_nan_or_inf, json_from_tensor, tensor_from_json
from .request_parameters import json_parameter

_NESTED: Final = "parameters"


def decode_request(body: bytes, model: ModelMetadata, version: int) -> InferenceRequest:
    """The request in `body`. Raises TritonError naming the key that is wrong."""
    document = parse(body)
    if not isinstance(document, dict):
        raise internal("attempt to get members for non-object")
    request_id = ""
    if "id" in document:
        with parsing("id"):
            request_id = as_string(document["id"])
        check_id(request_id)
    mapping = _Mapping(model, request_id)
    mapping.refuse_repeated(body)
    mapping.add_all(document)
    return InferenceRequest(
        model_name=model.name,
        model_version=version,
        id=request_id,
        inputs=tuple(mapping.tensors.values()),
        parameters=mapping.parameters,
    )


class _Mapping:
    """Sorts the keys of a request into tensors (names of the model's inputs) and parameters (all others)."""

    def __init__(self, model: ModelMetadata, request_id: str) -> None:
        self._inputs = {tensor.name: tensor for tensor in model.inputs}
        self._tag = request_tag(request_id)
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, ParameterValue] = {}

    def refuse_repeated(self, body: bytes) -> None:
        """Raises TritonError INVALID_ARG if a JSON object holds an input's name twice. The slow search runs only where
        a name occurs twice in the text."""
        if any(body.count(b'"%b"' % name.encode()) > 1 for name in self._inputs):
            for name in repeated_keys(body):
                if name in self._inputs:
                    raise self._already_exists(name)

    def add_all(self, document: Mapping[str, Any]) -> None:
        if _NESTED in document and _NESTED in self._inputs:
            raise invalid_argument("Keyword 'parameters' for nested schema also given as input tensor name")
        check_count("members", document, MAX_PARAMETERS, self._tag)
        for key, value in document.items():
            if key == _NESTED:
                self._add_nested(value)
            else:
                self._add(key, value)

    def _add_nested(self, value: Any) -> None:
        try:
            members = as_object(value)
        except TritonError as error:
            raise internal(f"Expected JSON object for keyword: '{_NESTED}': {error.message}") from None
        check_count("parameters", members, MAX_PARAMETERS, self._tag)
        try:
            for key, item in members.items():
                self._add(key, item)
        except TritonError as error:
            raise TritonError(f"Converting keyword: '{_NESTED}': {error.message}", error.code) from None

    def _add(self, key: str, value: Any) -> None:
        tensor = self._inputs.get(key)
        if tensor is None:
            self.parameters[key] = json_parameter(key, value)
        elif key in self.tensors:
            raise self._already_exists(key)
        else:
            self.tensors[key] = _tensor(tensor, value)

    def _already_exists(self, name: str) -> TritonError:
        return invalid_argument(f"{self._tag}input '{name}' already exists in request")


def _tensor(model_input: TensorMetadata, value: Any) -> Tensor:
    is_bytes = model_input.datatype == "BYTES"
    if is_bytes:  # as in Triton, a wrong type is reported before a wrong shape
        value = flatten(value)
        tensor_from_json(model_input.name, "BYTES", (len(value),), value)
    count = len(value) if isinstance(value, list) else 1
    return tensor_from_json(model_input.name, model_input.datatype, _shape(model_input, count), value)


def _shape(model_input: TensorMetadata, count: int) -> tuple[int, ...]:
    """A shape for `count` elements by the model's dims: the innermost variable dim takes what the fixed dims leave, the
    other variable dims are 1.

    Raises TritonError INVALID_ARG when they do not fit.
    """
    fixed = 1
    for dim in model_input.shape:
        fixed *= dim if dim >= 0 else 1
    free = [index for index, dim in enumerate(model_input.shape) if dim < 0]
    rest, left_over = divmod(count, fixed) if fixed else (0, count)
    if left_over or (not free and count != fixed):
        raise invalid_argument(f"The schema can not convert input '{model_input.name}' to tensor with proper shape")
    shape = [dim if dim >= 0 else 1 for dim in model_input.shape]
    if free:
        shape[free[-1]] = rest
    return tuple(shape)


def fields_of_response(response: InferenceResponse) -> dict[str, Any]:
    """Those beside the outputs."""
    fields: dict[str, Any] = {"model_name": response.model_name, "model_version": str(response.model_version)}
    if response.request_id:
        fields["id"] = response.request_id
    fields.update(response.parameters)
    return fields


def encode_response(response: InferenceResponse) -> bytes:
    """One response as a flat object with sorted keys; a tensor of one element is a scalar, others are flat arrays.

    An output that JSON cannot represent makes the whole an error object, since the status may have been sent already.
    """
    document = fields_of_response(response)
    try:
        for tensor in response.outputs:
            values = json_from_tensor(tensor)
            document[tensor.name] = values[0] if len(values) == 1 else values
    except TritonError as error:
        document = {"error": error.message}
    return dump(document, sort_keys=True, has_nan_or_inf=has_nan_or_inf(response.outputs))
