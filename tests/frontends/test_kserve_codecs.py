"""The codecs alone: any input is understood or refused with a TritonError; what goes out can be read back."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.messages import InferenceResponse, ModelMetadata, ParameterValue, TensorMetadata
from llmbackend.core.tensors import NUMPY_DTYPE, Tensor
from llmbackend.frontends.grpc import codec as grpc_codec
from llmbackend.frontends.grpc.codec import response_parts
from llmbackend.frontends.grpc.messages import OpenRequest
from llmbackend.frontends.http.json_reader import parse, repeated_keys
from llmbackend.frontends.http.responses import response_encoding
from llmbackend.frontends.kserve import generate, infer_codec
from llmbackend.frontends.kserve.infer_codec import json_from_tensor, tensor_from_json
from llmbackend.frontends.kserve.request_parameters import RequestOptions, options_from_proto

ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
MODEL = ModelMetadata(
    "m",
    ("1",),
    "x",
    (
        TensorMetadata("T", "BYTES", (-1, 1)),
        TensorMetadata("I", "INT32", (2, -1, 3, -1)),
        TensorMetadata("B", "BOOL", (1,)),
        TensorMetadata("F", "FP32", (-1,)),
        TensorMetadata("Z", "UINT8", (0, -1)),
    ),
    (),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5))
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)
NAMES = st.sampled_from([*"TIBFZ", "id", "parameters", "triton_x", "other"])
TENSORS = st.dictionaries(
    st.sampled_from(["name", "datatype", "shape", "data", "parameters"]),
    JSON
    | st.sampled_from([*NUMPY_DTYPE, "X"])
    | st.lists(st.integers(-1, 3), max_size=3)
    | st.fixed_dictionaries({}, optional={"binary_data_size": JSON, "shared_memory_region": JSON}),
)
PARAMETERS = st.dictionaries(
    st.sampled_from(["sequence_id", "sequence_start", "priority", "timeout", "binary_data_output", "p"]), JSON
)


def accepts_or_refuses(call: Any) -> None:
    """Anything but a TritonError with a message would be a bug."""
    try:
        call()
    except TritonError as error:
        assert error.message


@ANY_SPEED
@given(body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body(body: bytes) -> None:
    accepts_or_refuses(lambda: infer_codec.decode_request(body, len(body), "m", 1, 1 << 20))
    accepts_or_refuses(lambda: generate.decode_request(body, MODEL, 1))


@ANY_SPEED
@given(
    document=st.fixed_dictionaries(
        {"inputs": st.lists(TENSORS, max_size=3) | JSON},
        optional={"id": JSON, "outputs": st.lists(TENSORS) | JSON, "parameters": PARAMETERS | JSON},
    ),
    raw=st.binary(max_size=8),
)
def test_any_infer_request(document: Any, raw: bytes) -> None:
    text = json.dumps(document).encode()
    accepts_or_refuses(lambda: infer_codec.decode_request(text + raw, len(text), "m", -1, 1 << 20))


@ANY_SPEED
@given(
    document=st.dictionaries(NAMES, JSON | st.dictionaries(NAMES, JSON)),
    repeat=st.booleans(),
)
def test_any_generate_request(document: Any, repeat: bool) -> None:
    text = json.dumps(document)
    body = ('{"T":"a",' + text[1:] if repeat and document else text).encode()
    accepts_or_refuses(lambda: generate.decode_request(body, MODEL, -1))


@ANY_SPEED
@given(data=st.binary(max_size=80))
def test_any_grpc_request(data: bytes) -> None:
    message = pb.ModelInferRequest()
    try:
        message.ParseFromString(data)
    except Exception:
        return
    accepts_or_refuses(
        lambda: grpc_codec.decode_request(
            OpenRequest(message, message.raw_input_contents), options_from_proto(message.parameters)
        )
    )


FLOATS32 = st.floats(width=32)
ARRAYS = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda items: np.array(items, dtype=np.int32)),
    st.lists(st.integers(0, 2**64 - 1)).map(lambda items: np.array(items, dtype=np.uint64)),
    st.lists(st.booleans()).map(lambda items: np.array(items, dtype=np.bool_)),
    st.lists(FLOATS32).map(lambda items: np.array(items, dtype=np.float32)),
    st.lists(st.floats()).map(lambda items: np.array(items, dtype=np.float64)),
    st.lists(st.text().filter(lambda text: text.isprintable())).map(
        lambda items: np.array([*(item.encode() for item in items), None], dtype=np.object_)[:-1]
    ),
)


@ANY_SPEED
@given(array=ARRAYS)
def test_a_tensor_goes_through_json_and_back(array: Any) -> None:
    tensor = Tensor.of("T", array)
    json_text, raws = infer_codec.encode_response(InferenceResponse("m", 1, "", (tensor,)), infer_codec.OutputForm())
    assert raws == []
    data = parse(json_text)["outputs"][0]["data"]
    back = tensor_from_json("T", tensor.datatype, tensor.shape, data)
    same = back.data == tensor.data
    if array.dtype.kind == "f":
        same |= np.isnan(back.data) & np.isnan(tensor.data)
    assert np.all(same) and len(json_from_tensor(tensor)) == array.size


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        ((-1, 4), 8, (2, 4)),
        ((-1, 1), 3, (3, 1)),
        ((2, -1, 3, -1), 12, (2, 1, 3, 2)),
        ((1,), 1, (1,)),
        ((-1,), 0, (0,)),
        ((1,), 2, None),
        ((2, -1), 3, None),
        ((0, -1), 0, None),
    ],
)
def test_elements_are_spread_over_the_models_dims(shape: Any, count: int, expected: Any) -> None:
    model = ModelMetadata("m", ("1",), "x", (TensorMetadata("X", "INT32", shape),), ())
    body = json.dumps({"X": list(range(count))}).encode()
    if expected is None and shape != (0, -1):
        with pytest.raises(TritonError, match="can not convert input 'X' to tensor with proper shape"):
            generate.decode_request(body, model, 1)
    elif expected is not None:
        (tensor,) = generate.decode_request(body, model, 1).inputs
        assert tensor.shape == expected


def test_nan_is_kept_in_generate() -> None:
    response = InferenceResponse("m", 1, "i", (Tensor.of("X", np.array([math.nan], np.float32)),))
    assert generate.encode_response(response) == b'{"X":NaN,"id":"i","model_name":"m","model_version":"1"}'


def test_half_precision_is_refused_in_json() -> None:
    tensor = Tensor.of("X", np.array([1.0], np.float16))
    with pytest.raises(TritonError, match="sending FP16 data via JSON is not supported") as caught:
        infer_codec.encode_response(InferenceResponse("m", 1, "", (tensor,)), infer_codec.OutputForm())
    assert caught.value.code is ErrorCode.INVALID_ARG
    form = infer_codec.OutputForm(binary={"X": True})
    assert infer_codec.encode_response(InferenceResponse("m", 1, "", (tensor,)), form)[1] == [b"\x00\x3c"]


def test_response_parameters_reach_every_protocol() -> None:
    parameters: dict[str, ParameterValue] = {"s": "v", "i": 3, "b": True, "f": 0.5}
    response = InferenceResponse("m", 1, "", (), parameters)
    assert json.loads(infer_codec.encode_response(response, infer_codec.OutputForm())[0])["parameters"] == parameters
    assert json.loads(generate.encode_response(response)).items() >= parameters.items()
    message: Any = pb.ModelInferResponse.FromString(b"".join(response_parts(response)))
    assert message.parameters["b"].bool_param and message.parameters["i"].int64_param == 3


@pytest.mark.parametrize(
    ("header", "encoding"),
    [
        ("", None),
        ("identity", None),
        ("gzip, deflate", "gzip"),
        ("gzip;q=0.1, deflate;q=0.9", "deflate"),
        ("GZIP;q=0", None),
        ("gzip;q=x", None),
        ("br, *", None),
    ],
)
def test_response_encoding(header: str, encoding: str | None) -> None:
    assert response_encoding(header) == encoding


def test_repeated_keys_at_any_depth() -> None:
    digits = "9" * 5000
    assert repeated_keys(b'{"a":{"b":1,"b":%b},"a":2,"c":[{"c":1}]}' % digits.encode()) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("[" * 100 + "]" * 100, False),
        ("[" * 101 + "]" * 101, True),
        ('{"a":"' + "[" * 500 + '"}', False),
        ('["\\"' + "[" * 500 + '"]', False),
        ("[" + "[]," * (1 << 19) + "1]", False),
        ("[" + "[]," * (1 << 19) + "[" * 100 + "]" * 101, True),
    ],
)
def test_nesting_depth(text: str, deep: bool) -> None:
    if deep:
        with pytest.raises(TritonError, match="nesting depth exceeds"):
            parse(text.encode())
    else:
        parse(text.encode())


def cpu_time_s(data: list[Any]) -> float:
    began_s = time.process_time()
    infer_codec.flatten(data)
    return time.process_time() - began_s


def test_leaves_are_read_once_however_deep_a_list_beside_them_is() -> None:
    assert infer_codec.flatten([1, [], [2, [[3], 4], []], [[[5]]], 6]) == [1, 2, 3, 4, 5, 6]
    assert infer_codec.flatten("a") == ["a"] and infer_codec.flatten([[]]) == []
    flat = list(range(100_000))
    deep: Any = 0
    for _ in range(95):
        deep = [deep]
    assert infer_codec.flatten([deep, *flat]) == [0, *flat]
    shallow_s = min(cpu_time_s([[0], *flat]) for _ in range(3))
    assert min(cpu_time_s([deep, *flat]) for _ in range(3)) < 10 * shallow_s


def test_options_default_to_nothing() -> None:
    assert options_from_proto({}) == RequestOptions()


def test_a_sequence_id_has_no_sign() -> None:
    """NVIDIA's C++ client sends ids from 2**63 on as negative numbers."""
    sent = {"sequence_id": pb.InferParameter(int64_param=-2)}
    assert options_from_proto(sent).correlation_id == 2**64 - 2
