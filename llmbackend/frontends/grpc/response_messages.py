"""ModelInferResponse and ModelStreamInferResponse as bytes.

What all responses of a stream share is serialised once, and a large tensor is copied once. Does not know: calls, the
event loop. Invariant: the bytes are those that protocol buffers' own serialiser makes of the same message.
Source: the wire format of protocol buffers; grpc_service.proto.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.outputs import OutputLayout, Outputs
from llmbackend.core.tensors import Tensor, wire_view

FINAL_PARAMETER: Final = "triton_final_response"
_STRING_LENGTH: Final = struct.Struct("<I")
_LENGTH: Final = 2
"""The wire type of what has a length before it."""


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _tag(message: Any, field: str) -> bytes:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return _varint(number << 3 | _LENGTH)


_SHORT: Final = tuple(map(_varint, range(1024)))
_INFER_RESPONSE: Final = _tag(pb.ModelStreamInferResponse, "infer_response")
_OUTPUT: Final = _tag(pb.ModelInferResponse, "outputs")
_RAW: Final = _tag(pb.ModelInferResponse, "raw_output_contents")


def _length(num_bytes: int) -> bytes:
    return _SHORT[num_bytes] if num_bytes < len(_SHORT) else _varint(num_bytes)


@functools.lru_cache(maxsize=1024)
def _streamed_head(model_name: str, model_version: int, request_id: str, final: bool) -> bytes:
    """A streamed ModelInferResponse up to its outputs, of a response without parameters."""
    return _head(model_name, model_version, request_id, {FINAL_PARAMETER: final})


def _head(model_name: str, model_version: int, request_id: str, parameters: Mapping[str, ParameterValue]) -> bytes:
    """A ModelInferResponse up to its outputs."""
    message = pb.ModelInferResponse(model_name=model_name, model_version=str(model_version), id=request_id)
    for name, value in parameters.items():
        _set_parameter(message.parameters[name], value)
    serialised: bytes = message.SerializeToString()
    return serialised


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
    """An entry of `outputs`."""
    message = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    serialised: bytes = message.SerializeToString()
    return _OUTPUT + _length(len(serialised)) + serialised


def response_parts(response: InferenceResponse, in_shared_memory: Collection[str] = ()) -> list[bytes | memoryview]:
    """The ModelInferResponse of a response that has no error, without the data of outputs that are in shared memory, in
    parts to be joined: tensors are not copied."""
    head = _head(response.model_name, response.model_version, response.request_id, response.parameters)
    return [head, *_described(response.outputs, in_shared_memory)]


def stream_message(response: InferenceResponse, final: bool, in_shared_memory: Collection[str] = ()) -> bytes:
    """The ModelStreamInferResponse of a response that has no error, without the data of outputs in shared memory."""
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


@functools.lru_cache(maxsize=1024)
def _text_descriptions(layout: OutputLayout) -> bytes:
    return b"".join([_description(name, "BYTES", (1,)) for name in layout.names])


def _raw_text(text: str | bytes) -> bytes:
    """An entry of `raw_output_contents`: one string with its length before it."""
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
    """The message of a response without outputs: of an error, or of the end of a request."""
    message = pb.ModelStreamInferResponse(error_message=error)
    message.infer_response.model_name, message.infer_response.id = model_name, request_id
    message.infer_response.parameters[FINAL_PARAMETER].bool_param = final
    serialised: bytes = message.SerializeToString()
    return serialised


def refusal_message(request_id: str, error: str) -> bytes:
    """The message for a request that never reached a model, which the client recognises by its id alone."""
    message = pb.ModelStreamInferResponse(error_message=error, infer_response=pb.ModelInferResponse(id=request_id))
    serialised: bytes = message.SerializeToString()
    return serialised
