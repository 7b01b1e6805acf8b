"""Typed contents of large gRPC messages: what numpy unpacks is what the protocol buffers' own parser says."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.errors import TritonError
from llmbackend.frontends.grpc.messages import MAX_FIELDS, packed_varints, parse_contents, raw_contents, split_off

NUMBERS = {
    "BOOL": ("bool_contents", 0, 1),
    "INT8": ("int_contents", -(1 << 31), (1 << 31) - 1),
    "INT32": ("int_contents", -(1 << 31), (1 << 31) - 1),
    "INT64": ("int64_contents", -(1 << 63), (1 << 63) - 1),
    "UINT8": ("uint_contents", 0, (1 << 32) - 1),
    "UINT32": ("uint_contents", 0, (1 << 32) - 1),
    "UINT64": ("uint64_contents", 0, (1 << 64) - 1),
    "FP32": ("fp32_contents", -9, 9),
    "FP64": ("fp64_contents", -9, 9),
}


def request_of(datatype: str, field: str, values: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m", id="i")
    request.inputs.add(name="before", datatype="INT8", shape=[1])
    request.inputs.add(name="A", datatype=datatype, shape=[len(values)])
    getattr(request.inputs[1].contents, field).extend(values)
    return request


def unpacked(data: bytes) -> tuple[pb.ModelInferRequest, dict[int, bytes]]:
    parsed = parse_contents(data, False)
    assert parsed is not None
    small, contents = parsed
    return pb.ModelInferRequest.FromString(small), {index: bytes(buffer.raw()) for index, buffer in contents.items()}


@pytest.mark.parametrize("datatype", NUMBERS)
@pytest.mark.parametrize("spread", [4, 20, 64])
def test_numbers_are_those_of_the_librarys_parser(datatype: str, spread: int) -> None:
    field, least, most = NUMBERS[datatype]
    rng = random.Random(spread)
    for count in (1, 3, 70_000):
        values = [rng.randint(max(least, -(1 << spread)), min(most, 1 << spread)) for _ in range(count)]
        request = request_of(datatype, field, values)
        message, contents = unpacked(request.SerializeToString())
        assert contents == {1: raw_contents(request.inputs[1], "m")}
        assert message.inputs[1].HasField("contents") and not message.inputs[1].contents.ListFields()
        assert (message.id, message.inputs[1].shape, message.inputs[0].name) == ("i", [count], "before")
        assert not message.inputs[0].HasField("contents")


def test_contents_of_other_forms_are_read_alike() -> None:
    text = request_of("BYTES", "bytes_contents", [b"", b"ab", b"c" * 300])
    assert unpacked(text.SerializeToString())[1] == {1: raw_contents(text.inputs[1], "m")}
    numbers = request_of("INT32", "int_contents", [1, -2, 300])
    parts = pb.ModelInferRequest.InferInputTensor(contents=pb.InferTensorContents(int_contents=[4])).SerializeToString()
    single = b"\x10\x05\x10\x06"  # int_contents as two fields, not packed
    tensor = numbers.inputs[1].SerializeToString() + parts + b"\x2a" + bytes([len(single)]) + single
    data = b"\x2a" + bytes([len(tensor)]) + tensor
    _, contents = unpacked(data)
    assert np.frombuffer(contents[0], np.int32).tolist() == [1, -2, 300, 4, 5, 6]


def test_what_is_wrong_is_refused_as_by_the_library() -> None:
    wrong = request_of("INT32", "fp32_contents", [1.0])
    with pytest.raises(TritonError, match=r"tensor data for input tensor 'A' for model 'm' of type 'FP32', expected"):
        parse_contents(wrong.SerializeToString(), False)
    assert unpacked_with_raws(wrong) == {}
    for broken in (b"\x80", b"\x80" * 10 + b"\1", b"\1" * 20 + b"\x80" * 11 + b"\1"):
        with pytest.raises(DecodeError):
            packed_varints(memoryview(broken), np.dtype(np.int64))
    for contents in (
        b"\x12\x01\x80",
        b"\x32\x03abc",
        b"\x12\x05\1",
    ):  # a number without end, three bytes of a float, short
        tensor = b"\x12\x05INT32" if contents[0] == 0x12 else b"\x12\x04FP32"
        tensor += b"\x2a" + bytes([len(contents)]) + contents
        assert parse_contents(b"\x2a" + bytes([len(tensor)]) + tensor, False) is None
    with pytest.raises(TritonError, match=f"more than {MAX_FIELDS} fields"):
        split_off(memoryview(b"\x18\x01" * (MAX_FIELDS + 1)), 7)


def unpacked_with_raws(request: pb.ModelInferRequest) -> Any:
    parsed = parse_contents(request.SerializeToString(), True)
    assert parsed is not None
    return parsed[1]


def test_numbers_are_unpacked_in_pieces() -> None:
    """More than are decoded at once, so that some lie across a border."""
    values = np.arange(1_000_000, dtype=np.int64) * 37
    request = request_of("INT64", "int64_contents", values.tolist())
    assert unpacked(request.SerializeToString())[1] == {1: values.tobytes()}
