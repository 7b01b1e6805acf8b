"""Converts ModelInferRequest to the host's messages, and responses to ModelInferResponse and stream messages.

Invariants: tensors stay raw bytes, which the host checks; what all responses of a stream share is serialised once; a
large tensor is copied once; the bytes equal those of protobuf's own serialiser. Sources: grpc_service.proto and
Triton's infer_handler; texts recorded from Triton 2.51.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.errors import internal, invalid_argument
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.outputs import OutputLayout, Outputs
from llmbackend.core.tensors import NUMPY_DTYPE, RawTensor, SharedInput, Tensor, wire_view

from ..errors import log_bug
from ..kserve.request_parameters import RequestOptions, classes_from_proto, shared_range_from_proto
from .messages import LENGTH, OpenRequest, input_label, raw_contents, varint
from .rpc import INTERNAL_ERROR

FINAL_PARAMETER: Final = "triton_final_response"
_STRING_LENGTH: Final = struct.Struct("<I")


def _tag(message: Any, field: str) -> bytes:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return varint(number << 3 | LENGTH)


_SHORT: Final = tuple(map(varint, range(1024)))
_INFER_RESPONSE: Final = _tag(pb.ModelStreamInferResponse, "infer_response")
_OUTPUT: Final = _tag(pb.ModelInferResponse, "outputs")
_RAW: Final = _tag(pb.ModelInferResponse, "raw_output_contents")


def _length(num_bytes: int) -> bytes:
    return _SHORT[num_bytes] if num_bytes < len(_SHORT) else varint(num_bytes)


@functools.lru_cache(maxsize=1024)
def _streamed_head(model_name: str, model_version: int, request_id: str, final: bool) -> bytes:
    """Like `_head`, for a streamed response without parameters."""
    return _head(model_name, model_version, request_id, {FINAL_PARAMETER: final})


def _head(model_name: str, model_version: int, request_id: str, parameters: Mapping[str, ParameterValue]) -> bytes:
    """A ModelInferResponse up to its outputs."""
    message = pb.ModelInferResponse(model_name=model_name, model_version=str(model_version), id=request_id)
    for name, value in parameters.items():
        _set_parameter(message.parameters[name], value)
    return bytes(message.SerializeToString())


def _set_parameter(parameter: pb.InferParameter, value: ParameterValue) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


@functools.lru_cache(maxsize=1024)
def _description(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """A tensor's entry in `outputs`, without data."""
    message = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    serialised: bytes = message.SerializeToString()
    return _OUTPUT + _length(len(serialised)) + serialised


def response_parts(response: InferenceResponse, in_shared_memory: Collection[str] = ()) -> list[bytes | memoryview]:
    """The ModelInferResponse of a response without an error, as parts to be joined: tensors are not copied. Data of
    outputs in shared memory is omitted."""
    head = _head(response.model_name, response.model_version, response.request_id, response.parameters)
    return [head, *_described(response.outputs, in_shared_memory)]


def stream_message(response: InferenceResponse, final: bool, in_shared_memory: Collection[str] = ()) -> bytes:
    """Like `response_parts`, for a ModelStreamInferResponse. Raises TritonError INTERNAL if it cannot be encoded."""
    try:
        names = response.model_name, response.model_version, response.request_id
        if response.parameters:
            head = _head(*names, {**response.parameters, FINAL_PARAMETER: final})
        else:
            head = _streamed_head(*names, final)
        parts: list[bytes | memoryview] = [head]
        outputs = response.outputs
        if type(outputs) is Outputs and outputs.layout.is_text and not in_shared_memory:
            parts.append(_text_descriptions(outputs.layout))
            parts += map(_raw_text, outputs.values)
        else:
            parts += _described(outputs, in_shared_memory)
        return b"".join((_INFER_RESPONSE, _length(sum(map(len, parts))), *parts))
    except Exception as error:
        log_bug(f"a response of model '{response.model_name}' cannot be encoded", error)
        raise internal(INTERNAL_ERROR) from None


@functools.lru_cache(maxsize=1024)
def _text_descriptions(layout: OutputLayout) -> bytes:
    return b"".join([_description(name, "BYTES", (1,)) for name in layout.names])


def _raw_text(text: str | bytes) -> bytes:
    """An entry of `raw_output_contents`: one string, preceded by its length."""
    data = text.encode() if isinstance(text, str) else text
    return b"".join((_RAW, _length(_STRING_LENGTH.size + len(data)), _STRING_LENGTH.pack(len(data)), data))


def _described(outputs: Sequence[Tensor], in_shared_memory: Collection[str]) -> list[bytes | memoryview]:
    """The entries of `outputs`, then those of `raw_output_contents`."""
    parts: list[bytes | memoryview] = []
    raws: list[bytes | memoryview] = []
    for tensor in outputs:
        raw = b"" if tensor.name in in_shared_memory else wire_view(tensor)
        parts.append(_description(tensor.name, tensor.datatype, tensor.shape))
        raws += (_RAW, _length(len(raw)), raw)
    return parts + raws


def outcome_message(model_name: str, request_id: str, final: bool, error: str = "") -> bytes:
    """A response without outputs: an error, or the end of a request."""
    message = pb.ModelStreamInferResponse(error_message=error)
    message.infer_response.model_name, message.infer_response.id = model_name, request_id
    message.infer_response.parameters[FINAL_PARAMETER].bool_param = final
    return bytes(message.SerializeToString())


def refusal_message(request_id: str, error: str) -> bytes:
    """The answer to a request that did not reach any model; only the id tells the client which request it was."""
    message = pb.ModelStreamInferResponse(error_message=error, infer_response=pb.ModelInferResponse(id=request_id))
    return bytes(message.SerializeToString())


UNKNOWN_DATATYPE: Final = "<invalid>"
"""Triton's name for an unknown datatype."""


def model_version(text: str) -> int:
    """The number in a request's version string, -1 for "". Raises TritonError INVALID_ARG for anything else."""
    if not text:
        return -1
    try:
        return int(text)
    except ValueError:
        raise invalid_argument(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        ) from None


def decode_request(request: OpenRequest, options: RequestOptions) -> InferenceRequest:
    """options: from `request`'s parameters. Raises TritonError for an input without data, or with two kinds of data."""
    message = request.message
    inputs, shared = _inputs(request)
    outputs = message.outputs
    special = [output for output in outputs if output.parameters]
    shared_outputs = {
        output.name: shared_range for output in special if (shared_range := shared_range_from_proto(output)) is not None
    }
    classes = {output.name: count for output in special if (count := classes_from_proto(output))}
    return InferenceRequest(
        model_name=message.model_name,
        model_version=model_version(message.model_version),
        id=message.id,
        inputs=tuple(inputs),
        requested_outputs=tuple([output.name for output in outputs]),
        parameters=options.parameters,
        correlation_id=options.correlation_id,
        flags=options.flags,
        priority=options.priority,
        timeout_us=options.timeout_us,
        shared_inputs=tuple(shared),
        shared_outputs=shared_outputs,
        classes=classes,
    )


def _inputs(request: OpenRequest) -> tuple[list[RawTensor], list[SharedInput]]:
    """Inputs with data, each with an entry in `raw_input_contents`, and inputs in shared memory."""
    inputs: list[RawTensor] = []
    shared: list[SharedInput] = []
    message = request.message
    for index, tensor in enumerate(message.inputs):
        shared_range = shared_range_from_proto(tensor) if tensor.parameters else None
        if shared_range is None:
            inputs.append(_input(request, tensor, index, len(inputs)))
        elif tensor.HasField("contents"):
            raise invalid_argument(
                f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' for model "
                f"'{message.model_name}'"
            )
        else:
            shared.append(SharedInput(tensor.name, _datatype(tensor), tuple(tensor.shape), shared_range))
    return inputs, shared


def _datatype(tensor: Any) -> str:
    datatype: str = tensor.datatype
    return datatype if datatype in NUMPY_DTYPE else UNKNOWN_DATATYPE


def _input(request: OpenRequest, tensor: Any, index: int, raw_index: int) -> RawTensor:
    """index: among all inputs; raw_index: among those that are not in shared memory"""
    message, raws = request.message, request.raws
    if raws and tensor.HasField("contents"):
        raise invalid_argument(
            f"contents field must not be specified when using raw_input_contents for "
            f"{input_label(tensor, message.model_name)}"
        )
    raw: bytes | memoryview
    if raw_index < len(raws):
        raw = raws[raw_index]
    elif not raws and index in request.contents:
        raw = request.contents[index]
    elif not raws and tensor.HasField("contents"):
        raw = raw_contents(tensor, message.model_name)
    else:
        label = input_label(tensor, message.model_name)
        raise invalid_argument(f"unable to find data for input tensor {label} in request.")
    return RawTensor(tensor.name, _datatype(tensor), tuple(tensor.shape), raw)
