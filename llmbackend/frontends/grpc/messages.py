"""Parses inference requests, large ones off the event loop.

Invariants: nothing that takes more than milliseconds is parsed on the event loop, where gRPC calls deserialisers;
tensors may have any size, and numpy processes them. Sources: the protobuf wire format; grpc_service.proto; Triton's
infer_handler, texts recorded from 2.51.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.errors import invalid_argument
from llmbackend.core.requests.request_validation import (
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

_VARINT, _FIXED_64, LENGTH, _FIXED_32 = 0, 1, 2, 5
_WIDTHS: Final = {_FIXED_64: 8, _FIXED_32: 4}
_MAX_VARINT_BYTES: Final = 10
_CHUNK_BYTES: Final = 1 << 20
"""How many bytes of packed varints are decoded together. numpy's temporary arrays take 25 times as much."""


class Field(NamedTuple):
    """Offsets of one field of a message."""

    number: int
    kind: int
    """Wire type."""
    start: int
    """Where its tag begins."""
    value: int
    """Where its value begins, after tag and length."""
    end: int


def fields(data: memoryview) -> Iterator[Field]:
    """The fields in order. Raises DecodeError."""
    offset = 0
    while offset < len(data):
        start = offset
        tag, offset = read_varint(data, offset)
        number, kind = tag >> 3, tag & 7
        if kind == LENGTH:
            length, offset = read_varint(data, offset)
            value, offset = offset, offset + length
        elif kind == _VARINT:
            value, (_, offset) = offset, read_varint(data, offset)
        elif kind in _WIDTHS:
            value, offset = offset, offset + _WIDTHS[kind]
        else:
            raise DecodeError(f"field of wire type {kind}")
        if offset > len(data):
            raise DecodeError("cut short")
        yield Field(number, kind, start, value, offset)


def read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    """The number at `offset`, and the offset after it. Raises DecodeError."""
    if offset < len(data) and (byte := data[offset]) < 0x80:  # the common case
        return byte, offset + 1
    value = 0
    for index, byte in enumerate(data[offset : offset + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset + index + 1
    raise DecodeError("unterminated varint")


def write_length_field(number: int, value: bytes | memoryview) -> bytes:
    """A length-delimited field (wire type LENGTH): an embedded message, or bytes."""
    return varint(number << 3 | LENGTH) + varint(len(value)) + value


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def packed_varints(data: memoryview, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The numbers of a packed varint field, truncated to the width of `dtype`; bool: whether they are not 0. Raises
    DecodeError for an unterminated number or one of more than 10 bytes."""
    raw = np.frombuffer(data, np.uint8)
    if raw.size and raw[-1] >= 0x80:
        raise DecodeError("unterminated varint")
    if not (raw >= 0x80).any():  # the common case: each number is one byte
        return raw.astype(dtype)
    numbers = np.empty(np.count_nonzero(raw < 0x80), dtype)
    done = 0
    while raw.size:
        ends = np.flatnonzero(raw[: _CHUNK_BYTES + _MAX_VARINT_BYTES] < 0x80) + 1
        if not ends.size:
            raise DecodeError("varint of more than 10 bytes")
        numbers[done : done + ends.size] = _varints(raw, ends).astype(dtype)
        done, raw = done + ends.size, raw[ends[-1] :]
    return numbers


def _varints(raw: npt.NDArray[np.uint8], ends: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
    """The numbers that end before `ends`; the first begins at 0."""
    starts = np.concatenate(([0], ends[:-1]))
    widths = ends - starts
    if widths.max() > _MAX_VARINT_BYTES:
        raise DecodeError("varint of more than 10 bytes")
    values = np.zeros(ends.size, np.uint64)
    for place in range(widths.max()):
        there = np.flatnonzero(widths > place)
        values[there] |= (raw[starts[there] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values


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
_DATATYPE_OF_FIELD: Final = {name: datatype for datatype, name in _CONTENTS_FIELD.items()}
"""The widest datatype of each field, which is the last one."""
MAX_FIELDS: Final = 20_000
"""Limit of a message's own fields: inputs, outputs, raw contents, parameters, ids. Nested fields are not counted."""
RAW_INPUT_CONTENTS: Final = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_INPUTS: Final = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["inputs"].number
_CONTENTS: Final = pb.ModelInferRequest.InferInputTensor.DESCRIPTOR.fields_by_name["contents"].number
_FIELD_NAMES: Final = {
    number: field.name for number, field in pb.InferTensorContents.DESCRIPTOR.fields_by_number.items()
}
UNPARSABLE: Final = "Unable to parse request"


class Malformed:
    """Placeholder for a request that is not a valid message."""


@dataclass(frozen=True, slots=True)
class LargeRequest:
    """A serialised ModelInferRequest."""

    data: bytes


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A parsed request within the limits."""

    message: Any
    raws: Sequence[bytes | memoryview]
    """The message's raw_input_contents."""
    contents: Mapping[int, bytes] = field(default_factory=dict)
    """Raw bytes of inputs whose typed contents were removed from the message, by position."""


def parse_or_keep(data: bytes) -> Any:
    """A ModelInferRequest, or a LargeRequest that is parsed later. Raises DecodeError."""
    if len(data) > LARGE_BODY_BYTES:
        return LargeRequest(data)
    return pb.ModelInferRequest.FromString(data)


async def opened(request: Any, gate: InferenceGate) -> OpenRequest:
    """request: from `parse_or_keep`. Raw tensors of a large request are neither copied nor parsed. If the rest is
    large, it is parsed in a worker process, which returns small messages.

    Raises MalformedError if it is not a valid message, TritonError INVALID_ARG for a request beyond a limit, or for
    typed contents of another datatype.
    """
    if isinstance(request, Malformed):
        raise MalformedError(UNPARSABLE)
    if not isinstance(request, LargeRequest):
        _check_bounds(request)
        return OpenRequest(request, request.raw_input_contents)
    try:
        rest, raws = split_off(memoryview(request.data), RAW_INPUT_CONTENTS)
        if len(rest) <= LARGE_BODY_BYTES:
            message = pb.ModelInferRequest.FromString(rest)
            _check_bounds(message)
            return OpenRequest(message, raws)
    except DecodeError:
        raise MalformedError(UNPARSABLE) from None
    parsed: Any = await gate.decode_in_process(
        len(rest), parse_contents, rest, bool(raws)
    )  # PickleBuffers arrive as bytes
    if parsed is None:
        raise MalformedError(UNPARSABLE)
    small, contents = parsed
    return OpenRequest(pb.ModelInferRequest.FromString(small), raws, contents)


def parse_contents(data: bytes, has_raws: bool) -> tuple[bytes, dict[int, PickleBuffer]] | None:
    """Runs in a worker process: returns the message without its typed contents, and these as raw bytes; None if it is
    not a valid message.

    has_raws: the contents are only removed, since such a request is refused. Raises TritonError INVALID_ARG like
    `opened`.
    """
    try:
        small, parts = _split_contents(memoryview(data))
        if len(small) > LARGE_BODY_BYTES:
            raise invalid_argument(
                f"the id, names, shapes and parameters of the request take {len(small)} bytes, at most "
                f"{LARGE_BODY_BYTES} are accepted"
            )
        message = pb.ModelInferRequest.FromString(small)
        _check_bounds(message)
        if has_raws:
            return small, {}
        return small, {
            index: PickleBuffer(_unpacked(message.inputs[index], contents, message.model_name))
            for index, contents in parts.items()
        }
    except DecodeError:
        return None


def _split_contents(data: memoryview) -> tuple[bytes, dict[int, bytes]]:
    """The message with empty typed contents, and the contents by input position."""
    rest: list[bytes | memoryview] = []
    contents: dict[int, bytes] = {}
    num_inputs = 0
    for part in fields(data):
        if (part.number, part.kind) != (_INPUTS, LENGTH):
            rest.append(data[part.start : part.end])
            continue
        tensor, found = split_off(data[part.value : part.end], _CONTENTS)
        if found:
            contents[num_inputs] = b"".join(found)  # a message sent in parts is their concatenation
            tensor += write_length_field(_CONTENTS, b"")
        rest.append(write_length_field(_INPUTS, tensor))
        num_inputs += 1
    return b"".join(rest), contents


def _check_bounds(message: Any) -> None:
    check_id(message.id)
    check_count("inputs", message.inputs, MAX_TENSORS)
    check_count("requested outputs", message.outputs, MAX_TENSORS)
    check_count("parameters", message.parameters, MAX_PARAMETERS)
    for tensor in message.inputs:
        check_dimensions(tensor.name, tensor.shape)


def input_label(tensor: Any, model_name: str) -> str:
    return f"'{tensor.name}' for model '{model_name}'"


def raw_contents(tensor: Any, model_name: str) -> bytes:
    """An input's typed contents as raw bytes. Raises TritonError INVALID_ARG for another datatype or too many
    strings."""
    expected = _CONTENTS_FIELD.get(tensor.datatype)
    for given, _ in tensor.contents.ListFields():
        if given.name != expected:
            raise invalid_argument(
                f"unexpected explicit tensor data for input tensor {input_label(tensor, model_name)} of type "
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


def _unpacked(tensor: Any, contents: bytes, model_name: str) -> Any:
    """Like `raw_contents`, for serialised contents; also raises DecodeError. numpy reads packed numbers. Everything
    else goes to the protobuf parser, which takes 30 bytes of memory per byte of empty strings."""
    packed = _packed_numbers(memoryview(contents), _CONTENTS_FIELD.get(tensor.datatype, ""))
    if packed is None:
        tensor.contents.MergeFromString(contents)
        return raw_contents(tensor, model_name)
    dtype = NUMPY_DTYPE[tensor.datatype]
    if dtype.kind != "f":
        return packed_varints(packed, dtype)
    if len(packed) % dtype.itemsize:
        raise DecodeError("truncated number")
    return packed


def _packed_numbers(contents: memoryview, name: str) -> memoryview | None:
    """The value of the numeric field `name`, if the message has no other field."""
    found = next(fields(contents), None)
    if found is None or (_FIELD_NAMES.get(found.number), found.kind) != (name, LENGTH) or found.end < len(contents):
        return None
    return None if name == "bytes_contents" else contents[found.value :]


def split_off(data: memoryview, number: int) -> tuple[bytes, list[memoryview]]:
    """The message without its fields `number`, which are messages or bytes, and views of these. Takes time proportional
    to the number of fields, not to their bytes. Raises DecodeError, and TritonError INVALID_ARG for too many fields."""
    rest: list[memoryview] = []
    found: list[memoryview] = []
    for count, part in enumerate(fields(data), 1):
        if count > MAX_FIELDS:
            raise invalid_argument(f"the request has more than {MAX_FIELDS} fields, the maximum")
        if (part.number, part.kind) == (number, LENGTH):
            found.append(data[part.value : part.end])
        else:
            rest.append(data[part.start : part.end])
    return b"".join(rest), found
