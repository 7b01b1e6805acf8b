"""ModelInfer and ModelStreamInfer: raw tensors, typed contents of every datatype, and all other parts of a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from .attack import Attack, GrpcSent, Sent

_OVERHEAD = 4096
_CONTENTS: dict[str, tuple[str, Any, int]] = {
    "BOOL": ("bool_contents", True, 1),
    "INT8": ("int_contents", 1, 1),
    "INT16": ("int_contents", 1, 1),
    "INT32": ("int_contents", 1, 1),
    "INT64": ("int64_contents", 1, 1),
    "UINT8": ("uint_contents", 1, 1),
    "UINT16": ("uint_contents", 1, 1),
    "UINT32": ("uint_contents", 1, 1),
    "UINT64": ("uint64_contents", 1, 1),
    "FP32": ("fp32_contents", 0.5, 4),
    "FP64": ("fp64_contents", 0.5, 8),
    "BYTES": ("bytes_contents", b"", 2),
}
"""Of each datatype: the field, a value, and the bytes that it takes on the wire."""
_PIECE = 1 << 16


def _request(datatype: str, shape: list[int], model: str = "") -> Any:
    request = pb.ModelInferRequest(model_name=model or f"echo_{datatype}")
    request.inputs.add(name="IN", datatype=datatype, shape=shape)
    return request


def _sent(request: Any, **how: bool) -> list[Sent]:
    rpc = "ModelStreamInfer" if how.get("is_stream") else "ModelInfer"
    return [GrpcSent(rpc, request.SerializeToString(), **how)]


def _contents(datatype: str) -> Callable[[int], list[Sent]]:
    name, value, width = _CONTENTS[datatype]

    def make(size: int) -> list[Sent]:
        count = (size - _OVERHEAD) // width
        request = _request(datatype, [count])
        values = getattr(request.inputs[0].contents, name)
        for start in range(0, count, _PIECE):
            values.extend([value] * min(_PIECE, count - start))
        return _sent(request)

    return make


def _raw(
    datatype: str, raw: Callable[[int], bytes], shape: list[int] | None = None, **how: bool
) -> Callable[[int], list[Sent]]:
    def make(size: int) -> list[Sent]:
        data = raw((size - _OVERHEAD) // 20 * 20)
        request = _request(datatype, shape or [len(data) // 4])
        request.raw_input_contents.append(data)
        return _sent(request, **how)

    return make


def _to_stream(size: int) -> list[Sent]:
    request = pb.ModelInferRequest(model_name="steady")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(bytes((size - _OVERHEAD) // 4 * 4))
    return _sent(request, is_stream=True, gzip=True)


def _many(part: Callable[[int], Any], is_stream: bool = False) -> Callable[[int], list[Sent]]:
    """A message of many small parts: serialised messages that follow one another are one message."""

    def make(size: int) -> list[Sent]:
        small = _request("INT32", [1])
        small.raw_input_contents.append(bytes(4))
        head = small.SerializeToString()
        piece = part(1000).SerializeToString()
        message = head + piece * max((size - len(head) - _OVERHEAD) // len(piece), 1)
        return [GrpcSent("ModelStreamInfer" if is_stream else "ModelInfer", message, is_stream)]

    return make


def _inputs(count: int) -> Any:
    return pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor() for _ in range(count)])


def _outputs(count: int) -> Any:
    return pb.ModelInferRequest(
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="OUT") for _ in range(count)]
    )


def _raws(count: int) -> Any:
    return pb.ModelInferRequest(raw_input_contents=[b""] * count)


def _parameters(size: int) -> list[Sent]:
    request = _request("INT32", [1])
    request.raw_input_contents.append(bytes(4))
    for number in range((size - _OVERHEAD) // 16):
        request.parameters[str(number)].bool_param = True
    return _sent(request)


def _tensor_parameters(size: int) -> list[Sent]:
    request = _request("INT32", [1])
    request.raw_input_contents.append(bytes(4))
    for number in range((size - _OVERHEAD) // 16):
        request.inputs[0].parameters[str(number)].bool_param = True
    return _sent(request)


def _shape(size: int) -> list[Sent]:
    request = _request("INT32", [1] * (size - _OVERHEAD))
    request.raw_input_contents.append(bytes(4))
    return _sent(request)


def _huge_id(size: int) -> list[Sent]:
    request = _request("INT32", [1])
    request.id = "i" * (size - _OVERHEAD)
    request.raw_input_contents.append(bytes(4))
    return _sent(request)


_ZEROS = _raw("BYTES", bytes, [1])
GRPC_ATTACKS = (
    *(Attack(f"gRPC contents {datatype}", _contents(datatype)) for datatype in _CONTENTS),
    Attack("gRPC raw FP32", _raw("FP32", bytes)),
    Attack("gRPC raw FP32 gzip", _raw("FP32", bytes, gzip=True)),
    Attack("gRPC empty strings", _ZEROS),
    Attack("gRPC empty strings gzip", _raw("BYTES", bytes, [1], gzip=True)),
    Attack("gRPC empty strings gzip, stream", _to_stream),
    Attack("gRPC one-letter strings", _raw("BYTES", lambda size: b"\1\0\0\0x" * (size // 5), [1])),
    Attack("gRPC as many strings", _raw("BYTES", bytes)),
    Attack("gRPC a million strings", _raw("BYTES", bytes), most_bytes=4 << 20),
    Attack("gRPC many inputs", _many(_inputs)),
    Attack("gRPC many inputs, stream", _many(_inputs, is_stream=True)),
    Attack("gRPC many outputs", _many(_outputs)),
    Attack("gRPC many raw contents", _many(_raws)),
    Attack("gRPC many parameters", _parameters, most_bytes=32 << 20),
    Attack("gRPC many parameters of an input", _tensor_parameters, most_bytes=32 << 20),
    Attack("gRPC many dimensions", _shape),
    Attack("gRPC huge id", _huge_id),
    Attack("gRPC no message", lambda size: [GrpcSent("ModelInfer", b"\xff" * size)]),
)
