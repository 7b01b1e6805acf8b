"""Every refusal of a request, with Triton's text (golden transcripts 12, 13, 31)."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.requests.request_validation import BATCH_NOTE, RequestValidator
from llmbackend.core.tensors import RawTensor, Tensor, from_wire, to_wire

NO_ID = "[request id: <id_unknown>] "
IDENTITY = text_format.Parse(
    """name: "identity" max_batch_size: 8 input { name: "INPUT0" data_type: TYPE_FP32 dims: 4 }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }""",
    ModelConfig(),
)
MULTI = text_format.Parse(
    """name: "multi" input { name: "S" data_type: TYPE_STRING dims: -1 }
    input { name: "I" data_type: TYPE_INT32 dims: [2, -1] }
    input { name: "B" data_type: TYPE_BOOL dims: 1 optional: true }
    output { name: "S" data_type: TYPE_STRING dims: -1 } output { name: "I" data_type: TYPE_INT32 dims: [2, -1] }""",
    ModelConfig(),
)


def request(*inputs: Tensor | RawTensor, **fields: object) -> InferenceRequest:
    return InferenceRequest("m", inputs=inputs, **fields)  # type: ignore[arg-type]


def refusal(config: ModelConfig, *inputs: Tensor | RawTensor, **fields: object) -> str:
    with pytest.raises(TritonError) as caught:
        RequestValidator(config).validate(request(*inputs, **fields))
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def fp32(*shape: int, name: str = "INPUT0", datatype: str = "FP32", byte_count: int | None = None) -> RawTensor:
    size = 4 * int(np.prod(shape)) if byte_count is None else byte_count
    return RawTensor(name, datatype, shape, bytes(size))


def strings(*values: bytes, shape: tuple[int, ...] | None = None, tail: bytes = b"") -> RawTensor:
    raw = b"".join(struct.pack("<I", len(value)) + value for value in values) + tail
    return RawTensor("S", "BYTES", shape or (len(values),), raw)


INTS = RawTensor("I", "INT32", (2, 1), bytes(8))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            (),
            "expected 1 inputs but got 0 inputs for model 'identity'. Got input(s) [], but missing required input(s) "
            "['INPUT0']. Please provide all required input(s).",
        ),
        (
            (fp32(1, 4), fp32(1, 4, name="EXTRA")),
            "expected 1 inputs but got 2 inputs for model 'identity'. Got input(s) ['EXTRA','INPUT0'], but missing "
            "required input(s) ]. Please provide all required input(s).",
        ),
        ((fp32(1, 4), fp32(1, 4)), "input 'INPUT0' already exists in request"),
        ((fp32(9, 4),), "inference request batch-size must be <= 8 for 'identity'"),
        (
            (fp32(1, 3),),
            f"unexpected shape for input 'INPUT0' for model 'identity'. Expected [-1,4], got [1,3]. {BATCH_NOTE}",
        ),
        (
            (fp32(4),),
            f"unexpected shape for input 'INPUT0' for model 'identity'. Expected [-1,4], got [4]. {BATCH_NOTE}",
        ),
        ((fp32(),), "input 'INPUT0' has no shape but model requires batch dimension for 'identity'"),
        (
            (fp32(1, -4, byte_count=16),),
            "All input dimensions should be specified for input 'INPUT0' for model 'identity', got [1,-4]",
        ),
        (
            (fp32(1, 4, datatype="INT32"),),
            "inference input 'INPUT0' data-type is 'INT32', but model 'identity' expects 'FP32'",
        ),
        (
            (fp32(1, 4, datatype="FLOAT"),),
            "inference input 'INPUT0' data-type is '<invalid>', but model 'identity' expects 'FP32'",
        ),
        (
            (fp32(1, 4, byte_count=12),),
            "input byte size mismatch for input 'INPUT0' for model 'identity'. Expected 16, got 12",
        ),
        (
            (fp32(0, 4),),
            "input byte size mismatch for input 'INPUT0' for model 'identity'. Expected 16, got 0",
        ),
        (
            (fp32(-1, 4, byte_count=16),),
            "input byte size mismatch for input 'INPUT0' for model 'identity'. Expected 68719476720, got 16",
        ),
    ],
)
def test_batching_model_refuses(inputs: tuple[RawTensor, ...], message: str) -> None:
    assert refusal(IDENTITY, *inputs) == NO_ID + message


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            (strings(b"x"),),
            "expected number of inputs between 2 and 3 but got 1 inputs for model 'multi'. Got input(s) ['S'], but "
            "missing required input(s) ['I']. Please provide all required input(s).",
        ),
        (
            (strings(b"x"), RawTensor("B", "BOOL", (1,), b"\1")),
            "expected number of inputs between 2 and 3 but got 2 inputs for model 'multi'. Got input(s) ['B','S'], but "
            "missing required input(s) ['I']. Please provide all required input(s).",
        ),
        (
            (strings(b"x"), RawTensor("I", "INT32", (3, 1), bytes(12))),
            "unexpected shape for input 'I' for model 'multi'. Expected [2,-1], got [3,1]. ",
        ),
        (
            (strings(b"x", b"y", shape=(3,)), INTS),
            "expected 3 string elements for inference input 'S' for model 'multi', got 2",
        ),
        (
            (strings(b"x", b"y", shape=(1,)), INTS),
            "expected 1 string elements for inference input 'S' for model 'multi', got 2",
        ),
        (
            (strings(b"x", tail=b"\1\0"), INTS),
            "incomplete string length indicator for inference input 'S' for model 'multi', expecting 4 bytes but only "
            "2 bytes available. Please make sure the string length indicator is in one buffer.",
        ),
    ],
)
def test_unbatched_model_refuses(inputs: tuple[RawTensor, ...], message: str) -> None:
    assert refusal(MULTI, *inputs) == NO_ID + message


def test_the_tag_names_the_request() -> None:
    assert refusal(IDENTITY, id="r7").startswith("[request id: r7] expected 1 inputs")


def test_texts_without_a_tag() -> None:
    assert refusal(IDENTITY, fp32(1, 4, name="NOPE")) == "unexpected inference input 'NOPE' for model 'identity'"
    assert (
        refusal(IDENTITY, fp32(1, 4), requested_outputs=("NOPE",))
        == "unexpected inference output 'NOPE' for model 'identity'"
    )
    truncated = RawTensor("S", "BYTES", (1,), b"\x10\0\0\0ab")
    assert refusal(MULTI, truncated, INTS) == (
        "incomplete string data for inference input 'S', expecting string of length 16 but only 2 bytes available"
    )


def test_batch_sizes_must_agree() -> None:
    config = ModelConfig()
    config.CopyFrom(IDENTITY)
    config.input.add(name="INPUT1", data_type=config.input[0].data_type, dims=[4])
    message = refusal(config, fp32(2, 4), fp32(3, 4, name="INPUT1"))
    assert message == NO_ID + "input 'INPUT1' batch size does not match other inputs for 'identity'"


def test_raw_input_takes_the_shape_of_the_only_input() -> None:
    valid = RequestValidator(IDENTITY).validate(request(raw_input=struct.pack("<4f", 1, 2, 3, 4)))
    assert valid.inputs["INPUT0"].data.tolist() == [[1, 2, 3, 4]]
    assert refusal(IDENTITY, raw_input=b"") == (
        NO_ID + "input byte size mismatch for input 'raw_input' for model 'identity'. Expected 16, got 0"
    )
    assert refusal(MULTI, raw_input=b"x") == (
        NO_ID + "Raw request must only have 1 input (found 1) to be deduced but got 3 inputs in 'multi' model "
        "configuration"
    )


def test_a_raw_string_is_one_element_so_the_model_must_take_one() -> None:
    for dims in ("[ -1 ]", "[ 2 ]", "[ -1, 1 ]"):
        text = f'name: "m" input {{ name: "X" data_type: TYPE_STRING dims: {dims} }}'
        config = text_format.Parse(text, ModelConfig())
        assert refusal(config, raw_input=b"hi").endswith(
            "For BYTE datatype raw input 'X', the model must have input shape [1]"
        )


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (2**62, f"shape of input 'I' causes total element count to exceed maximum size of {2**63 - 1}"),
        (2**61, "byte size overflow for input 'I'"),
    ],
)
def test_a_shape_that_64_bits_can_not_count(width: int, message: str) -> None:
    assert refusal(MULTI, strings(b"a"), RawTensor("I", "INT32", (2, width), bytes(8))) == message


def test_an_output_is_asked_for_once() -> None:
    message = refusal(IDENTITY, fp32(1, 4), requested_outputs=("OUTPUT0", "OUTPUT0"))
    assert message == NO_ID + "output 'OUTPUT0' already exists in request"


def test_raw_input_of_variable_or_string_type() -> None:
    config = text_format.Parse('name: "v" input { name: "X" data_type: TYPE_INT16 dims: [2, -1] }', ModelConfig())
    assert RequestValidator(config).validate(request(raw_input=bytes(12))).inputs["X"].shape == (2, 3)
    config.input[0].dims[:] = [-1, -1]
    assert "more than one variable-sized dimension" in refusal(config, raw_input=bytes(12))
    config = text_format.Parse('name: "v" input { name: "X" data_type: TYPE_STRING dims: 1 }', ModelConfig())
    assert RequestValidator(config).validate(request(raw_input=b"hi")).inputs["X"].data.tolist() == [b"hi"]


def test_a_valid_request_is_decoded_and_its_outputs_sorted() -> None:
    valid = RequestValidator(MULTI).validate(request(strings("hé".encode(), b""), INTS))
    assert valid.inputs["S"].data.tolist() == ["hé".encode(), b""]
    assert valid.requested_outputs == ("I", "S")
    assert RequestValidator(IDENTITY).validate(request(fp32(3, 4))).batch_size == 3


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "BF16", "FP64", "BYTES"])
def test_wire_form_round_trips(datatype: str) -> None:
    if datatype == "BYTES":
        tensor = Tensor.text("T", "a", "", "ü")
    else:
        raw = bytes(range(48))
        count = {"BOOL": 48, "INT8": 48, "FP16": 24, "BF16": 24}.get(datatype, 6)
        tensor = from_wire("T", datatype, (2, count // 2), raw if datatype != "BOOL" else bytes([0, 1] * 24))
    again = from_wire("T", datatype, tensor.shape, to_wire(tensor))
    assert to_wire(again) == to_wire(tensor) and again.shape == tensor.shape


def test_strings_beyond_the_shape_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = RawTensor("S", "BYTES", (1,), bytes(40 << 20))  # ten million strings without a character
    assert refusal(MULTI, zeros, INTS) == (
        NO_ID + "expected 1 string elements for inference input 'S' for model 'multi', got at least 4097"
    )
    few = RawTensor("S", "BYTES", (3,), bytes(4 * 1000))
    assert refusal(MULTI, few, INTS).endswith("expected 3 string elements for inference input 'S' for model 'multi', "
                                              "got 1000")  # fmt: skip


def test_what_a_request_may_hold_is_bounded() -> None:
    many = RawTensor("S", "BYTES", (1 << 21,), bytes(8 << 20))
    assert refusal(MULTI, many, INTS) == (
        NO_ID + "the inputs with datatype BYTES have 2097152 elements, at most 1048576 are accepted in a request"
    )
    wide_shape = RawTensor("S", "BYTES", (1 << 60,), bytes(8))  # its data says that it holds two
    assert refusal(MULTI, wide_shape, INTS).endswith("'multi', got 2")
    assert refusal(MULTI, *[INTS] * 5000).endswith("the request has 5000 inputs, at most 4096 are accepted")
    assert "has 5000 requested outputs, at most" in refusal(MULTI, requested_outputs=("S",) * 5000)
    assert "has 5000 parameters, at most" in refusal(MULTI, parameters={str(key): 1 for key in range(5000)})
    deep = RawTensor("I", "INT32", (1,) * 2000, bytes(4))
    assert "the shape of input 'I' has 2000 dimensions, at most 1024 are accepted" in refusal(MULTI, deep)
    assert refusal(MULTI, INTS, id="x" * 5000) == "the request's id has 5000 characters, at most 4096 are accepted"


def test_as_many_strings_as_the_bound_are_decoded() -> None:
    count = 1 << 20
    valid = RequestValidator(MULTI).validate(request(RawTensor("S", "BYTES", (count,), bytes(4 * count)), INTS))
    assert valid.inputs["S"].data.shape == (count,) and valid.inputs["S"].data[-1] == b""
