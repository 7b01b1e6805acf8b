"""The bodies of /infer in KServe v2: JSON, followed by raw tensors.

Independent of HTTP and of shared memory regions. Invariants: every raw byte of a request belongs to exactly one input;
each input has exactly one source of data, each requested output one destination. Sources: KServe v2, Triton's
extensions for binary data, shared memory and classification; texts of Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmbackend.core.errors import internal, invalid_argument
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.requests.request_validation import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    check_count,
    check_dimensions,
    check_id,
    check_strings,
)
from llmbackend.core.tensors import (
    NUMPY_DTYPE,
    RawTensor,
    SharedInput,
    SharedRange,
    Tensor,
    check_size,
    element_count,
    reshaped,
    wire_view,
)

from ..errors import input_too_large
from ..http.json_reader import (
    array_member,
    as_array,
    as_bool,
    as_object,
    as_string,
    as_unsigned,
    dump,
    parse,
    parsing,
    string_member,
)
from .request_parameters import (
    CLASSIFICATION,
    REGION,
    check_output_parameters,
    classes_from_json,
    options_from_json,
    shared_range_from_json,
)

_BINARY_ONLY: Final = frozenset({"FP16", "BF16"})


def tensor_from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
    """data: nested or flat array (row-major), or a scalar. Raises TritonError INTERNAL for an element of the wrong JSON
    type, INVALID_ARG for a wrong number of elements, FP16 and BF16."""
    if datatype == "BYTES":
        array: npt.NDArray[Any] = _bytes_array(name, flatten(data), shape)
    else:
        array = _number_array(name, datatype, flatten(data), shape)
    return Tensor(name, datatype, shape, reshaped(name, array, shape))


def flatten(data: Any) -> list[Any]:
    """The leaves of nested lists in row-major order; a scalar is one leaf."""
    if not isinstance(data, list):
        return [data]
    if list not in set(map(type, data)):
        return data
    leaves: list[Any] = []
    open_lists = [iter(data)]
    while open_lists:
        for item in open_lists[-1]:
            if type(item) is list:
                open_lists.append(iter(item))
                break
            leaves.append(item)
        else:
            open_lists.pop()
    return leaves


def _number_array(name: str, datatype: str, leaves: list[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if datatype in _BINARY_ONLY and leaves:
        raise invalid_argument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    dtype = NUMPY_DTYPE[datatype]
    with parsing("data"):
        wide = _wide_array(dtype, leaves)
        _check_count(len(leaves), shape)
    with np.errstate(over="ignore"):
        return wide.astype(dtype)


def _wide_array(dtype: np.dtype[Any], leaves: list[Any]) -> npt.NDArray[Any]:
    """The leaves in the widest type of the dtype's kind, as RapidJSON's accessors return them."""
    types = set(map(type, leaves))
    if dtype.kind == "b":
        return np.array(_require(leaves, types <= {bool}, "non-boolean as boolean"), dtype=np.bool_)
    if dtype.kind == "u":
        fits = types <= {int} and (not leaves or (min(leaves) >= 0 and max(leaves) < 1 << 64))
        return np.array(_require(leaves, fits, "non-unsigned-integer as unsigned-integer"), dtype=np.uint64)
    if dtype.kind == "i":
        fits = types <= {int} and (not leaves or (min(leaves) >= -(1 << 63) and max(leaves) < 1 << 63))
        return np.array(_require(leaves, fits, "non-signed-integer as signed-integer"), dtype=np.int64)
    try:
        return np.array(_require(leaves, types <= {int, float}, "non-number as double"), dtype=np.float64)
    except OverflowError:  # an integer beyond the range of doubles
        raise internal("attempt to access JSON non-number as double") from None


def _require(leaves: list[Any], right: bool, mismatch: str) -> list[Any]:
    if not right:
        raise internal(f"attempt to access JSON {mismatch}")
    return leaves


def _bytes_array(name: str, leaves: list[Any], shape: tuple[int, ...]) -> npt.NDArray[np.object_]:
    if not set(map(type, leaves)) <= {str}:
        raise internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    with parsing("data"):
        _check_count(len(leaves), shape)
    check_strings(len(leaves), f"input '{name}' has")
    data = np.empty(len(leaves), dtype=np.object_)
    data[:] = [leaf.encode() for leaf in leaves]
    return data


def _check_count(count: int, shape: tuple[int, ...]) -> None:
    if count != element_count(shape):
        raise invalid_argument("Shape does not match true shape of 'data' field")


def json_from_tensor(tensor: Tensor) -> list[Any]:
    """A flat array. Raises TritonError INVALID_ARG for FP16 and BF16, INTERNAL for BYTES that are not UTF-8."""
    if tensor.datatype in _BINARY_ONLY:
        raise invalid_argument(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    if tensor.datatype == "BYTES":
        return [_text(tensor.name, element) for element in tensor.data.ravel()]
    if tensor.datatype == "FP32":  # Triton writes the shortest text of the double, not of the float
        return list(tensor.data.astype(np.float64).ravel().tolist())
    return list(tensor.data.ravel().tolist())


def _text(name: str, element: Any) -> str:
    if isinstance(element, str):
        return element
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError:
        text = f"output '{name}' is not valid UTF-8 and can not be sent as JSON. Please use the binary data format"
        raise internal(text) from None


def has_nan_or_inf(tensors: Sequence[Tensor]) -> bool:
    """Whether any element is NaN or infinite, for `dump`."""
    return any(tensor.data.dtype.kind == "f" and not np.isfinite(tensor.data).all() for tensor in tensors)


_NONE: dict[str, Any] = {}
_ONE_SOURCE: Final = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Which outputs are sent as JSON, as raw bytes, or not at all."""

    binary_by_default: bool = False
    """Whether outputs that are not in `binary` are raw bytes."""
    binary: Mapping[str, bool] = field(default_factory=dict)
    """Whether each of these outputs is raw bytes."""
    in_shared_memory: frozenset[str] = frozenset()
    """Outputs in shared memory, which are not sent."""

    def is_binary(self, name: str) -> bool:
        return self.binary.get(name, self.binary_by_default)

    def in_json(self, response: InferenceResponse) -> list[Tensor]:
        return [
            tensor
            for tensor in response.outputs
            if tensor.name not in self.in_shared_memory and not self.is_binary(tensor.name)
        ]


def decode_request(
    body: bytes, json_length: int, name: str, version: int, max_input_bytes: int
) -> tuple[InferenceRequest, OutputForm]:
    """json_length: Inference-Header-Content-Length, in bytes; 0: the body is one raw tensor
    max_input_bytes: of each input's data, which may be shorter in JSON

    Raises TritonError naming the invalid field.
    """
    if not json_length:
        return InferenceRequest(name, version, raw_input=body), OutputForm(binary_by_default=True)
    document = parse(body[:json_length])
    fields = document if isinstance(document, dict) else {}
    with parsing("id"):
        request_id = as_string(fields.get("id", ""))
    parameters = fields.get("parameters", {})
    with parsing("parameters"):
        as_object(parameters)
    items = array_member(document, "inputs")
    check_id(request_id)
    check_count("parameters", parameters, MAX_PARAMETERS)
    check_count("inputs", items, MAX_TENSORS)
    options = options_from_json(parameters)
    inputs = Inputs(name, memoryview(body)[json_length:], max_input_bytes)
    inputs.read(items)
    outputs = RequestedOutputs.read(document)
    request = InferenceRequest(
        model_name=name,
        model_version=version,
        id=request_id,
        inputs=tuple(inputs.sent),
        requested_outputs=tuple(outputs.names),
        parameters=options.parameters,
        correlation_id=options.correlation_id,
        flags=options.flags,
        priority=options.priority,
        timeout_us=options.timeout_us,
        shared_inputs=tuple(inputs.shared),
        shared_outputs=outputs.shared,
        classes=outputs.classes,
    )
    return request, OutputForm(options.binary_data_output, outputs.binary, frozenset(outputs.shared))


def encode_response(response: InferenceResponse, form: OutputForm) -> tuple[bytes, list[memoryview]]:
    """The JSON, and the raw bytes after it. Raises TritonError for an output that JSON cannot represent."""
    document: dict[str, Any] = {"id": response.request_id} if response.request_id else {}
    document |= {"model_name": response.model_name, "model_version": str(response.model_version)}
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    raws: list[memoryview] = []
    outputs: list[dict[str, Any]] = []
    for tensor in response.outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        outputs.append(output)
        if tensor.name in form.in_shared_memory:
            continue
        if form.is_binary(tensor.name):
            raws.append(wire_view(tensor))
            output["parameters"] = {"binary_data_size": raws[-1].nbytes}
        else:
            output["data"] = json_from_tensor(tensor)
    document["outputs"] = outputs
    json = dump(document, has_nan_or_inf=has_nan_or_inf(form.in_json(response)))
    return json, raws


def single_response(responses: list[InferenceResponse]) -> InferenceResponse:
    """The one response of a request that must have one. Raises its error, or INTERNAL."""
    if len(responses) != 1:
        raise internal(f"expected a single response, got {'more than one' if responses else 'none'}")
    if responses[0].error is not None:
        raise responses[0].error
    return responses[0]


class Inputs:
    """Reads the inputs in order; each raw input takes the first of the remaining raw bytes."""

    def __init__(self, model_name: str, raw: memoryview, max_input_bytes: int) -> None:
        self.sent: list[Tensor | RawTensor] = []
        self.shared: list[SharedInput] = []
        self._model_name = model_name
        self._raw = raw
        self._max_bytes = max_input_bytes

    def read(self, items: list[Any]) -> None:
        """Reads into `sent` and `shared`. Raises TritonError naming the invalid field."""
        for item in items:
            self._add(item)
        if self._raw.nbytes:
            raise invalid_argument(f"unexpected additional input data for model '{self._model_name}'")

    def _add(self, item: Any) -> None:
        name = string_member(item, "name")
        datatype = string_member(item, "datatype")
        if datatype not in NUMPY_DTYPE:
            raise invalid_argument(f"invalid datatype for input {name}")
        dims = array_member(item, "shape")
        check_dimensions(name, dims)
        with parsing("shape"):
            shape = tuple(map(as_unsigned, dims))
        check_size(name, datatype, shape)
        parameters = _parameters_of(item)
        _check_one_source(item, parameters)
        if REGION in parameters:
            self.shared.append(SharedInput(name, datatype, shape, shared_range_from_json(parameters)))
        elif "data" in item:
            with parsing("data"):
                as_array(item["data"])
            self._check_json_size(name, datatype, shape)
            self.sent.append(tensor_from_json(name, datatype, shape, item["data"]))
        else:
            with parsing("binary_data_size"):
                size = as_unsigned(parameters["binary_data_size"])
            self.sent.append(RawTensor(name, datatype, shape, self._take(name, size)))

    def _check_json_size(self, name: str, datatype: str, shape: tuple[int, ...]) -> None:
        if datatype == "BYTES":  # strings are no shorter in JSON
            return
        size_bytes = element_count(shape) * NUMPY_DTYPE[datatype].itemsize
        if size_bytes > self._max_bytes:
            raise input_too_large(f"JSON input '{name}'", size_bytes, self._max_bytes)

    def _take(self, name: str, size: int) -> memoryview:
        missing = size - self._raw.nbytes
        if missing > 0:
            raise invalid_argument(
                f"unexpected size for input '{name}', expecting {missing} additional bytes "
                f"for model '{self._model_name}'"
            )
        taken, self._raw = self._raw[:size], self._raw[size:]
        return taken


def _parameters_of(item: Any) -> Mapping[str, Any]:
    parameters = item.get("parameters", _NONE) if type(item) is dict else _NONE
    if type(parameters) is dict:
        return parameters
    with parsing("parameters"):
        return as_object(parameters)


def _check_one_source(item: Any, parameters: Mapping[str, Any]) -> None:
    if ("data" in item) + ("binary_data_size" in parameters) + (REGION in parameters) == 1:
        return
    sources = ["data"] if "data" in item else []
    sources += [key for key in ("binary_data_size", REGION) if key in parameters]
    if not sources:
        raise invalid_argument(_ONE_SOURCE + "no field is set")
    raise invalid_argument(_ONE_SOURCE + "set " + " ".join(f"'{source}'" for source in sources))


class RequestedOutputs:
    """The requested outputs, in the client's order. `binary`: whether an output is sent as raw bytes or as JSON."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.binary: dict[str, bool] = {}
        self.shared: dict[str, SharedRange] = {}
        self.classes: dict[str, int] = {}

    @classmethod
    def read(cls, document: Any) -> RequestedOutputs:
        """Raises TritonError naming the invalid field."""
        with parsing("outputs"):
            items = as_array(document.get("outputs", []))
        check_count("requested outputs", items, MAX_TENSORS)
        outputs = cls()
        for item in items:
            outputs._add(item)
        return outputs

    def _add(self, item: Any) -> None:
        parameters = _parameters_of(item)
        check_output_parameters(parameters)
        name = string_member(item, "name")
        self.names.append(name)
        if CLASSIFICATION in parameters and (count := classes_from_json(parameters)):
            self.classes[name] = count
        if REGION in parameters:
            self.shared[name] = shared_range_from_json(parameters)
        elif "binary_data" in parameters:
            with parsing("binary_data"):
                self.binary[name] = as_bool(parameters["binary_data"])
