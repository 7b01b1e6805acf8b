"""The /infer messages of KServe v2: JSON with raw tensors behind it, in and out.

For: the /infer handler. Does not know: HTTP, the event loop. Invariant: every raw byte of a request belongs to
exactly one input; each input has exactly one source of data.
Source: KServe v2 inference protocol and Triton's binary tensor data extension; texts as recorded from Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmbackend.core.errors import internal, invalid_argument
from llmbackend.core.messages import InferenceRequest, InferenceResponse, RawTensor, ResponseCallback, SharedInput
from llmbackend.core.tensors import NUMPY_DTYPE, Place, Tensor, to_wire

from .json_reader import as_array, as_bool, as_object, as_string, as_unsigned, dump, member, parse, parsing
from .json_tensors import has_nan_or_inf, json_from_tensor, tensor_from_json
from .request_parameters import options_from_json
from .shared_memory_params import check_output_parameters, classes_from_json, place_from_json

_ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Which outputs travel as raw bytes: those named, and all others as `binary_by_default` says. Those in shared
    memory do not travel."""

    binary_by_default: bool = False
    binary: Mapping[str, bool] = field(default_factory=dict)
    in_shared_memory: frozenset[str] = frozenset()

    def is_binary(self, name: str) -> bool:
        return self.binary.get(name, self.binary_by_default)


@dataclass(frozen=True, slots=True)
class InferBody:
    """A request's body, split: `json` and the raw tensor bytes after it. json None = the body is one raw tensor."""

    json: bytes | None
    raw: memoryview

    @classmethod
    def split(cls, body: bytes, json_length: int) -> InferBody:
        """`json_length` is Inference-Header-Content-Length, in bytes; 0 = no JSON at all."""
        return cls(body[:json_length] if json_length else None, memoryview(body)[json_length:])


def decode_request(
    body: InferBody, name: str, version: int, callback: ResponseCallback
) -> tuple[InferenceRequest, OutputForm]:
    """The request in `body`. Raises TritonError naming the field that is wrong."""
    if body.json is None:
        raw = InferenceRequest(name, callback, version, raw_input=bytes(body.raw))
        return raw, OutputForm(binary_by_default=True)
    document = parse(body.json)
    request_id = _optional_string(document, "id")
    parameters = document.get("parameters", {}) if isinstance(document, dict) else {}
    with parsing("parameters"):
        as_object(parameters)
    options = options_from_json(parameters)
    with parsing("inputs"):
        items = as_array(member(document, "inputs"))
    inputs = _Inputs(name, body.raw).decode(items)
    outputs = _RequestedOutputs.decode(document)
    request = InferenceRequest(
        model_name=name,
        response_callback=callback,
        model_version=version,
        id=request_id,
        inputs=tuple(item for item in inputs if not isinstance(item, SharedInput)),
        requested_outputs=tuple(outputs.names),
        parameters=options.parameters,
        correlation_id=options.correlation_id,
        flags=options.flags,
        priority=options.priority,
        timeout_us=options.timeout_us,
        shared_inputs=tuple(item for item in inputs if isinstance(item, SharedInput)),
        output_places=outputs.places,
        classes=outputs.classes,
    )
    return request, OutputForm(options.binary_data_output, outputs.binary, frozenset(outputs.places))


def _optional_string(document: Any, key: str) -> str:
    if not isinstance(document, dict) or key not in document:
        return ""
    with parsing(key):
        return as_string(document[key])


class _Inputs:
    """Reads the inputs in order, each taking its raw bytes off the front of what is left."""

    def __init__(self, model_name: str, raw: memoryview) -> None:
        self._model_name = model_name
        self._raw = raw

    def decode(self, items: list[Any]) -> tuple[Tensor | RawTensor | SharedInput, ...]:
        inputs = tuple(self._input(item) for item in items)
        if self._raw.nbytes:
            raise invalid_argument(f"unexpected additional input data for model '{self._model_name}'")
        return inputs

    def _input(self, item: Any) -> Tensor | RawTensor | SharedInput:
        with parsing("name"):
            name = as_string(member(item, "name"))
        with parsing("datatype"):
            datatype = as_string(member(item, "datatype"))
        if datatype not in NUMPY_DTYPE:
            raise invalid_argument(f"invalid datatype for input {name}")
        with parsing("shape"):
            shape = tuple(as_unsigned(dim) for dim in as_array(member(item, "shape")))
        parameters = _parameters_of(item)
        _check_one_source(item, parameters)
        place = place_from_json(parameters)
        if place is not None:
            return SharedInput(name, datatype, shape, place)
        if "data" in item:
            return tensor_from_json(name, datatype, shape, item["data"])
        with parsing("binary_data_size"):
            size = as_unsigned(parameters["binary_data_size"])
        return RawTensor(name, datatype, shape, self._take(name, size))

    def _take(self, name: str, size: int) -> bytes:
        missing = size - self._raw.nbytes
        if missing > 0:
            raise invalid_argument(
                f"unexpected size for input '{name}', expecting {missing} additional bytes "
                f"for model '{self._model_name}'"
            )
        taken, self._raw = self._raw[:size], self._raw[size:]
        return bytes(taken)


def _parameters_of(item: Any) -> Mapping[str, Any]:
    if not isinstance(item, dict) or "parameters" not in item:
        return {}
    with parsing("parameters"):
        return as_object(item["parameters"])


def _check_one_source(item: Any, parameters: Mapping[str, Any]) -> None:
    sources = ["data"] if "data" in item else []
    sources += [key for key in ("binary_data_size", "shared_memory_region") if key in parameters]
    if not sources:
        raise invalid_argument(_ONE_SOURCE + "no field is set")
    if len(sources) > 1:
        raise invalid_argument(_ONE_SOURCE + "these are set: " + ", ".join(f"'{source}'" for source in sources))


@dataclass(frozen=True, slots=True)
class _RequestedOutputs:
    """What the client asks for, in its order: `binary` holds those asked for as binary or as JSON."""

    names: dict[str, None] = field(default_factory=dict)
    binary: dict[str, bool] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def decode(cls, document: Any) -> _RequestedOutputs:
        with parsing("outputs"):
            items = as_array(document.get("outputs", []))
        outputs = cls()
        for item in items:
            outputs._add(item)
        return outputs

    def _add(self, item: Any) -> None:
        parameters = _parameters_of(item)
        check_output_parameters(parameters)
        with parsing("name"):
            name = as_string(member(item, "name"))
        self.names[name] = None
        if classes := classes_from_json(parameters):
            self.classes[name] = classes
        place = place_from_json(parameters)
        if place is not None:
            self.places[name] = place
        elif "binary_data" in parameters:
            with parsing("binary_data"):
                self.binary[name] = as_bool(parameters["binary_data"])


def encode_response(response: InferenceResponse, form: OutputForm) -> tuple[bytes, bytes | None]:
    """(JSON, raw bytes after it); None instead of raw bytes = every output is in the JSON.

    Raises TritonError for an output that JSON can not carry.
    """
    document: dict[str, Any] = {"id": response.request_id} if response.request_id else {}
    document |= {"model_name": response.model_name, "model_version": str(response.model_version)}
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    raws: list[bytes] = []
    outputs: list[dict[str, Any]] = []
    for tensor in response.outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        outputs.append(output)
        if tensor.name in form.in_shared_memory:
            continue  # its data is there
        if form.is_binary(tensor.name):
            raws.append(to_wire(tensor))
            output["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            output["data"] = json_from_tensor(tensor)
    document["outputs"] = outputs
    in_json = [
        tensor
        for tensor in response.outputs
        if tensor.name not in form.in_shared_memory and not form.is_binary(tensor.name)
    ]
    json = dump(document, has_nan_or_inf=has_nan_or_inf(in_json))
    return json, b"".join(raws) if raws else None


def single_response(responses: list[InferenceResponse]) -> InferenceResponse:
    """The one response of a request that must have one. Raises its error, or INTERNAL for any other number."""
    if len(responses) != 1:
        raise internal(f"expected a single response, got {'more than one' if responses else 'none'}")
    if responses[0].error is not None:
        raise responses[0].error
    return responses[0]
