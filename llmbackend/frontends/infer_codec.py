"""The /infer messages of KServe v2: JSON with raw tensors behind it, in and out.

For: the /infer handler. Does not know: HTTP, the event loop; tensors of a request are read by infer_tensors. Invariant:
an output travels in exactly one way: as JSON, as raw bytes, or not at all (it is in shared memory).
Source: KServe v2 inference protocol and Triton's binary tensor data extension; texts as recorded from Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmbackend.core.errors import internal
from llmbackend.core.messages import InferenceRequest, InferenceResponse, ResponseCallback
from llmbackend.core.requests.request_bounds import MOST_PARAMETERS, MOST_TENSORS, check_count, check_id
from llmbackend.core.tensors import Tensor, wire_view

from .infer_tensors import Inputs, RequestedOutputs
from .json_reader import array_member, as_object, as_string, dump, parse, parsing
from .json_tensors import has_nan_or_inf, json_from_tensor
from .request_parameters import options_from_json


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Which outputs travel as raw bytes: those named, and all others as `binary_by_default` says. Those in shared
    memory do not travel."""

    binary_by_default: bool = False
    binary: Mapping[str, bool] = field(default_factory=dict)
    in_shared_memory: frozenset[str] = frozenset()

    def is_binary(self, name: str) -> bool:
        return self.binary.get(name, self.binary_by_default)

    def in_json(self, response: InferenceResponse) -> list[Tensor]:
        """The outputs whose data is JSON."""
        return [
            tensor
            for tensor in response.outputs
            if tensor.name not in self.in_shared_memory and not self.is_binary(tensor.name)
        ]


@dataclass(frozen=True, slots=True)
class InferBody:
    """A request's body, split: `json` and the raw tensor bytes after it. json None = the body is one raw tensor."""

    json: bytes | None
    raw: memoryview

    @classmethod
    def split(cls, body: bytes, json_length: int) -> InferBody:
        """`json_length` is Inference-Header-Content-Length, in bytes; 0 = no JSON at all."""
        return cls(body[:json_length] if json_length else None, memoryview(body)[json_length:])


def decode_content(
    content: bytes, json_length: int, name: str, version: int, callback: ResponseCallback
) -> tuple[InferenceRequest, OutputForm]:
    """`decode_request` of a whole body, see `InferBody.split`."""
    return decode_request(InferBody.split(content, json_length), name, version, callback)


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
    items = array_member(document, "inputs")
    check_id(request_id)
    check_count("parameters", parameters, MOST_PARAMETERS)
    check_count("inputs", items, MOST_TENSORS)
    options = options_from_json(parameters)
    inputs = Inputs(name, body.raw)
    inputs.read(items)
    outputs = RequestedOutputs.read(document)
    request = InferenceRequest(
        model_name=name,
        response_callback=callback,
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
        output_places=outputs.places,
        classes=outputs.classes,
    )
    return request, OutputForm(options.binary_data_output, outputs.binary, frozenset(outputs.places))


def _optional_string(document: Any, key: str) -> str:
    if not isinstance(document, dict) or key not in document:
        return ""
    with parsing(key):
        return as_string(document[key])


def encode_response(response: InferenceResponse, form: OutputForm) -> tuple[bytes, list[memoryview]]:
    """The JSON, and the raw bytes of the outputs that are not in it.

    Raises TritonError for an output that JSON can not carry.
    """
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
            continue  # its data is there
        if form.is_binary(tensor.name):
            raws.append(wire_view(tensor))
            output["parameters"] = {"binary_data_size": raws[-1].nbytes}
        else:
            output["data"] = json_from_tensor(tensor)
    document["outputs"] = outputs
    json = dump(document, has_nan_or_inf=has_nan_or_inf(form.in_json(response)))
    return json, raws


def single_response(responses: list[InferenceResponse]) -> InferenceResponse:
    """The one response of a request that must have one. Raises its error, or INTERNAL for any other number."""
    if len(responses) != 1:
        raise internal(f"expected a single response, got {'more than one' if responses else 'none'}")
    if responses[0].error is not None:
        raise responses[0].error
    return responses[0]
