"""Messages of inference as they come from gRPC: small ones parsed, large ones parsed off the event loop.

For: the gRPC server's deserialisers, and the handlers of inference. Does not know: models, the host. Invariant: nothing
that takes more than milliseconds is parsed on the event loop, where gRPC calls deserialisers.
Source: the wire format of protocol buffers; grpc_service.proto; Triton's infer_handler, texts as recorded from 2.51.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.errors import invalid_argument
from llmbackend.core.requests.request_bounds import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    check_count,
    check_dimensions,
    check_id,
    check_strings,
)
from llmbackend.core.tensors import NUMPY_DTYPE

from ..errors import MalformedError
from ..inference_gate import LARGE_BODY_BYTES, InferenceGate

MAX_UNPARSED_BYTES: Final = 16 << 20
"""Beside raw tensors. Typed contents of this size take a worker process a second and a GiB."""
_CONTENTS_FIELD: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_DATATYPE_OF_FIELD: Final[Mapping[str, str]] = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}
MAX_FIELDS: Final = 20_000
"""Of a message, each nested message counted as one: inputs, outputs, raw contents, parameters, ids."""
RAW_INPUT_CONTENTS: Final = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_WIDTHS: Final = {_FIXED_64: 8, _FIXED_32: 4}
_MAX_VARINT_BYTES: Final = 10
UNPARSABLE: Final = "Unable to parse request"


class Malformed:
    """Takes the place of a request that is no message."""


@dataclass(frozen=True, slots=True)
class LargeRequest:
    """A serialised ModelInferRequest that has not been parsed."""

    data: bytes


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A parsed request, within the bounds of what one may hold."""

    message: Any
    raws: Sequence[bytes | memoryview]
    """The message's raw_input_contents."""
    contents: Mapping[int, bytes] = field(default_factory=dict)
    """Of inputs whose typed contents were taken out of the message, by position: their elements as raw bytes."""


def parse_or_keep(data: bytes) -> Any:
    """A ModelInferRequest, or a LargeRequest. Raises DecodeError."""
    if len(data) > LARGE_BODY_BYTES:
        return LargeRequest(data)
    return pb.ModelInferRequest.FromString(data)


async def opened(request: Any, gate: InferenceGate) -> OpenRequest:
    """The request that `parse_or_keep` returned, parsed. In a large one the raw tensors are found without copying or
    parsing them; what is large beside them is parsed in a worker process, and what comes back is small.

    Raises MalformedError when it is no message, TritonError INVALID_ARG when it holds too much of something, or typed
    contents that are not its datatype's.
    """
    _check_well_formed(request)
    if not isinstance(request, LargeRequest):
        _check_bounds(request)
        return OpenRequest(request, request.raw_input_contents)
    try:
        rest, raws = split_raw_contents(request.data)
        if len(rest) <= LARGE_BODY_BYTES:
            message = pb.ModelInferRequest.FromString(rest)
            _check_bounds(message)
            return OpenRequest(message, raws)
    except DecodeError:
        raise MalformedError(UNPARSABLE) from None
    if len(rest) > MAX_UNPARSED_BYTES:
        raise invalid_argument(
            f"the request has {len(rest)} bytes beside raw_input_contents, at most {MAX_UNPARSED_BYTES} are accepted; "
            f"send large tensors as raw_input_contents"
        )
    parsed: Any = await gate.decode_in_process(
        len(rest), parse_contents, rest, bool(raws)
    )  # PickleBuffers arrive as bytes
    if parsed is None:
        raise MalformedError(UNPARSABLE)
    small, contents = parsed
    if len(small) > LARGE_BODY_BYTES:
        raise invalid_argument(
            f"the names and parameters of the request take {len(small)} bytes, at most {LARGE_BODY_BYTES} are accepted"
        )
    return OpenRequest(pb.ModelInferRequest.FromString(small), raws, contents)


def parse_contents(data: bytes, has_raws: bool) -> tuple[bytes, dict[int, PickleBuffer]] | None:
    """For a worker process: the message without its typed contents, and these as raw bytes. None if it is no message.

    With `has_raws` the contents are only removed: such a request is refused anyway.
    """
    try:
        message = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return None
    _check_bounds(message)
    contents: dict[int, PickleBuffer] = {}
    for index, tensor in enumerate(message.inputs):
        if not tensor.HasField("contents"):
            continue
        if not has_raws:
            contents[index] = PickleBuffer(raw_contents(tensor, message.model_name))
        tensor.contents.Clear()  # the field stays set, without elements
        tensor.contents.SetInParent()
    return message.SerializeToString(), contents


def _check_well_formed(request: Any) -> None:
    """Raises MalformedError if `request` was no message."""
    if isinstance(request, Malformed):
        raise MalformedError(UNPARSABLE)


def _check_bounds(message: Any) -> None:
    check_id(message.id)
    check_count("inputs", message.inputs, MAX_TENSORS)
    check_count("requested outputs", message.outputs, MAX_TENSORS)
    check_count("parameters", message.parameters, MAX_PARAMETERS)
    for tensor in message.inputs:
        check_dimensions(tensor.name, tensor.shape)


def where(tensor: Any, model_name: str) -> str:
    """How errors name an input."""
    return f"'{tensor.name}' for model '{model_name}'"


def raw_contents(tensor: Any, model_name: str) -> bytes:
    """The typed contents of an input as raw bytes. Raises TritonError INVALID_ARG for a field that is not the
    datatype's, or for too many strings."""
    expected = _CONTENTS_FIELD.get(tensor.datatype)
    for given, _ in tensor.contents.ListFields():
        if given.name != expected:
            raise invalid_argument(
                f"unexpected explicit tensor data for input tensor {where(tensor, model_name)} of type "
                f"'{_DATATYPE_OF_FIELD[given.name]}', expected datatype '{tensor.datatype}'"
            )
    if expected is None:
        return b""
    values = getattr(tensor.contents, expected)
    if tensor.datatype == "BYTES":
        check_strings(len(values), f"input '{tensor.name}' has")
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    wide = NUMPY_DTYPE[_DATATYPE_OF_FIELD[expected]]
    return np.fromiter(values, wide, len(values)).astype(NUMPY_DTYPE[tensor.datatype]).tobytes()


def split_raw_contents(data: bytes) -> tuple[bytes, list[memoryview]]:
    """The serialised message without its raw_input_contents, and views of these, in order; by work in proportion to the
    number of fields, which is bounded, and not to their bytes.

    Raises DecodeError for what is no message, TritonError INVALID_ARG for a message of too many fields.
    """
    view = memoryview(data)
    rest: list[memoryview] = []
    raws: list[memoryview] = []
    offset = fields = 0
    while offset < len(data):
        fields += 1
        if fields > MAX_FIELDS:
            raise invalid_argument(f"the request has more than {MAX_FIELDS} fields, at most so many are accepted")
        start = offset
        tag, offset = _varint(data, offset)
        kind = tag & 7
        if kind == _LENGTH:
            length, offset = _varint(data, offset)
            offset += length
        elif kind == _VARINT:
            _, offset = _varint(data, offset)
        elif kind in _WIDTHS:
            offset += _WIDTHS[kind]
        else:
            raise DecodeError(f"field of wire type {kind}")
        if offset > len(data):
            raise DecodeError("cut short")
        if tag == RAW_INPUT_CONTENTS << 3 | _LENGTH:
            raws.append(view[offset - length : offset])
        else:
            rest.append(view[start:offset])
    return b"".join(rest), raws


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """The number at `offset`, and the offset behind it."""
    value = 0
    for index, byte in enumerate(data[offset : offset + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset + index + 1
    raise DecodeError("no end of a number")
