"""A serialised ModelInferRequest taken apart before it is parsed: its raw tensors, and the rest.

For: grpc_request. Does not know: what the fields mean, but for raw_input_contents. Invariant: the work is in proportion
to the number of fields, which is bounded, and not to their bytes; raw tensors are not copied.
Source: the wire format of protocol buffers; grpc_service.proto.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.errors import invalid_argument

MOST_FIELDS: Final = 20_000
"""Of a message, nested ones counted as one: inputs, outputs, raw contents, parameters, ids."""
RAW_INPUT_CONTENTS: Final = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_WIDTHS: Final = {_FIXED_64: 8, _FIXED_32: 4}
_LONGEST_VARINT: Final = 10


def split_raw_contents(data: bytes) -> tuple[bytes, list[memoryview]]:
    """The message without its raw_input_contents, and views of those, in order.

    Raises DecodeError for what is no message, TritonError INVALID_ARG for one of too many fields.
    """
    view = memoryview(data)
    rest: list[memoryview] = []
    raws: list[memoryview] = []
    offset = fields = 0
    while offset < len(data):
        fields += 1
        if fields > MOST_FIELDS:
            raise invalid_argument(f"the request has more than {MOST_FIELDS} fields, at most so many are accepted")
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
    for index, byte in enumerate(data[offset : offset + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset + index + 1
    raise DecodeError("no end of a number")
