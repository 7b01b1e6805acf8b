"""Calls of every RPC with unusual protobufs or invalid bytes, and frames for a port that expects HTTP/2.

Used by grpc_target.py. Independent of how a call is made. Invariant: a request that is executed is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from .http_inputs import DECOUPLED, WHOLE
from .inputs import mutated_bytes

STREAM = "ModelStreamInfer"
SHARED_MEMORY_KEY = "/llmbackend_fuzz"
"""A region that grpc_target makes: a text, and room for an answer."""


@dataclass(frozen=True)
class GrpcInput:
    rpc: str
    messages: tuple[bytes, ...]


def _infer(model: str) -> Any:
    request = pb.ModelInferRequest(model_name=model, id="7")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs[0].contents.bytes_contents.append(b"hello")
    request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    request.inputs[1].contents.bytes_contents.append(b'{"max_tokens": 2, "temperature": 0.5}')
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(model == DECOUPLED)
    request.outputs.add(name="text_output")
    request.parameters["priority"].uint64_param = 1
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def _raw_infer(model: str) -> Any:
    request = pb.ModelInferRequest(model_name=model, model_version="1")
    request.inputs.add(name="input_ids", datatype="INT32", shape=[2])
    request.raw_input_contents.append(b"\1\0\0\0\2\0\0\0")
    request.parameters["max_tokens"].int64_param = 2
    request.parameters["timeout"].int64_param = 9_000_000
    return request


def _shared_infer(model: str) -> Any:
    """Text in one region, output to another; both may not be there."""
    request = pb.ModelInferRequest(model_name=model, id="7")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.outputs.add(name="text_output")
    for tensor, size in ((request.inputs[0], 9), (request.outputs[0], 4096)):
        tensor.parameters["shared_memory_region"].string_param = "x"
        tensor.parameters["shared_memory_byte_size"].int64_param = size
    request.outputs.add(name="finish_reason").parameters["classification"].int64_param = 1
    request.parameters["max_tokens"].int64_param = 2
    return request


def _load() -> Any:
    request = pb.RepositoryModelLoadRequest(model_name="scratch")
    request.parameters["config"].string_param = '{"backend": "llm"}'
    request.parameters["file:1/model.json"].bytes_param = b'{"model": "mock", "transport": "inline"}'
    return request


_EXAMPLES: dict[str, list[Any]] = {
    "ServerLive": [pb.ServerLiveRequest()],
    "ServerReady": [pb.ServerReadyRequest()],
    "ServerMetadata": [pb.ServerMetadataRequest()],
    "ModelReady": [pb.ModelReadyRequest(name=DECOUPLED, version="1")],
    "ModelMetadata": [pb.ModelMetadataRequest(name=DECOUPLED, version="1")],
    "ModelConfig": [pb.ModelConfigRequest(name=DECOUPLED, version="1")],
    "ModelStatistics": [pb.ModelStatisticsRequest(name=DECOUPLED, version="1")],
    "RepositoryIndex": [pb.RepositoryIndexRequest(ready=True)],
    "RepositoryModelLoad": [_load()],
    "RepositoryModelUnload": [pb.RepositoryModelUnloadRequest(model_name="scratch")],
    "ModelInfer": [_infer(WHOLE), _raw_infer(WHOLE), _infer(DECOUPLED), _shared_infer(WHOLE)],
    STREAM: [_infer(DECOUPLED), _raw_infer(DECOUPLED), _infer(WHOLE), _raw_infer(WHOLE), _shared_infer(DECOUPLED)],
    "SystemSharedMemoryStatus": [pb.SystemSharedMemoryStatusRequest(name="x")],
    "SystemSharedMemoryRegister": [
        pb.SystemSharedMemoryRegisterRequest(name="x", key="k", byte_size=4),
        pb.SystemSharedMemoryRegisterRequest(name="x", key=SHARED_MEMORY_KEY, byte_size=8192),
    ],
    "SystemSharedMemoryUnregister": [pb.SystemSharedMemoryUnregisterRequest(name="x")],
    "CudaSharedMemoryRegister": [pb.CudaSharedMemoryRegisterRequest(name="x", raw_handle=b"h")],
    "TraceSetting": [pb.TraceSettingRequest(model_name=DECOUPLED)],
    "LogSettings": [pb.LogSettingsRequest()],
    "Check": [pb.ModelReadyRequest(name="x")],  # has the wire form of a HealthCheckRequest
}
_SHARE = {"ModelInfer": 6, STREAM: 8, "RepositoryModelLoad": 2}
_INTEGERS = st.sampled_from([0, 1, -1, 2, 64, 2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63), 2**64 - 1])
_TEXTS = st.sampled_from(
    [
        "", "mock", "whole", "1", "-1", "9" * 30, "9" * 5000, "\0", "../x", "INT32", "BYTES", "FP16", "BF16",
        "TYPE_FP32",
        "[" * 5000, '{"max_tokens": 1e999}', "é名😀", "x" * 5000, "text_input", "input_ids", "٣", " 1", "triton_x",
        "classification", "shared_memory_region", "binary_data_size",
    ]
)  # fmt: skip
_BYTES = st.sampled_from([b"", b"\0", b"\xff" * 3, b"\xff\xff\xff\xff", b"\5\0\0\0hello", b"{" * 5000, b"1" * 70_000])


@st.composite
def _protobufs(draw: st.DrawFn, examples: list[Any]) -> bytes:
    """A valid message in which up to four fields hold something else; then, sometimes, bytes are changed."""
    message = type(chosen := draw(st.sampled_from(examples)))()
    message.CopyFrom(chosen)
    for _ in range(draw(st.integers(0, 4))):
        _change(draw, message)
    data: bytes = message.SerializeToString()
    return draw(st.just(data) | st.just(data) | mutated_bytes([data]))


def _change(draw: st.DrawFn, message: Any) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = draw(st.sampled_from(list(fields)))
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_entry(draw, value)
    elif field.is_repeated and field.message_type is not None:
        if not value or draw(st.integers(0, 5)) == 0:
            value.add()
        if draw(st.integers(0, 15)) == 0:
            value.extend([value[0]] * draw(st.sampled_from([1, 70, 300])))
        _change(draw, value[draw(st.integers(0, len(value) - 1))])
    elif field.is_repeated:
        count = draw(st.sampled_from([0, 1, 1, 2, 100, 5000]))
        value[:] = [_scalar(draw, field)] * count
    elif field.message_type is not None:
        _change(draw, value)
    else:
        setattr(message, field.name, _scalar(draw, field))


def _change_entry(draw: st.DrawFn, entries: Any) -> None:
    key = draw(_TEXTS | st.sampled_from(sorted(entries) or ["x"]))
    entry = entries[key]
    if draw(st.booleans()):
        _change(draw, entry)


def _scalar(draw: st.DrawFn, field: Any) -> Any:
    """A value of the field's type."""
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            return draw(_BYTES) if field.type == field.TYPE_BYTES else draw(_TEXTS)
        case field.CPPTYPE_BOOL:
            return draw(st.booleans())
        case field.CPPTYPE_FLOAT | field.CPPTYPE_DOUBLE:
            return draw(st.sampled_from([float("nan"), float("inf"), -0.0, 5e-324, 1e38]))
    bits = 64 if "64" in str(field.cpp_type) or field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
    signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64, field.CPPTYPE_ENUM)
    value = draw(_INTEGERS) % (1 << bits)
    return value - (1 << bits) if signed and value >= 1 << (bits - 1) else value


@st.composite
def _calls(draw: st.DrawFn) -> GrpcInput:
    rpc = draw(st.sampled_from([name for name in _EXAMPLES for _ in range(_SHARE.get(name, 1))]))
    messages = _protobufs(_EXAMPLES[rpc])
    count = draw(st.integers(0, 4)) if rpc == STREAM else 1
    return GrpcInput(rpc, tuple(draw(messages) for _ in range(count)))


GRPC_INPUTS: st.SearchStrategy[GrpcInput] = _calls()

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


_FRAMES = [
    _frame(4, 0, 0, b""),
    _frame(4, 0, 0, b"\0\4\x7f\xff\xff\xff" * 50),
    _frame(1, 5, 1, b"\x82\x86\x84\x41\x8a\x08\x9d\x5c\x0b\x81\x70\xdc\x78\x0f\x03"),
    _frame(1, 4, 1, b"\x83\x86\x44\x0f/inference.GRPCI" + b"\x41\x01x"),
    _frame(0, 1, 1, b"\0\xff\xff\xff\xff"),
    _frame(0, 0, 1, b"\0\0\0\0\5hello"),
    _frame(3, 0, 1, b"\0\0\0\x08") * 300,
    _frame(6, 0, 0, bytes(8)) * 100,
    _frame(8, 0, 0, b"\x7f\xff\xff\xff"),
    _frame(9, 0, 1, b"\xff" * 100) * 30,
    _frame(7, 0, 0, bytes(8)),
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xff\xff" + bytes(6),
]
RAW_GRPC_INPUTS: st.SearchStrategy[bytes] = st.builds(
    lambda head, frames: head + b"".join(frames),
    st.sampled_from([_PREFACE] * 6 + [b"", _PREFACE[:10], b"\x16\x03\x01"]),
    st.lists(mutated_bytes(_FRAMES) | st.binary(max_size=40), max_size=8),
)
