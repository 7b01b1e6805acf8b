"""POST …/infer: JSON tensors, binary tensors, compressed bodies, and everything else that the JSON may contain."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .attack import JSON_LENGTH, MEMBER, Attack, HttpSent, Sent, numbered, repeated

ELEMENTS = {"BOOL": "true", "INT32": "7", "INT64": "-1234567890123", "UINT8": "200", "FP32": "0.12345", "FP64": "1e300"}

_OUTPUT = '{"name":"o%d"}'


def _path(model: str) -> str:
    return f"/v2/models/{model}/infer"


def _json(model: str, datatype: str, shape: list[int], data: str, more: str = "") -> HttpSent:
    tensor = f'{{"name":"IN","datatype":"{datatype}","shape":{json.dumps(shape)},"data":[{data}]}}'
    return HttpSent(_path(model), f'{{"inputs":[{tensor}]{more}}}'.encode())


def _numbers(datatype: str) -> Callable[[int], list[Sent]]:
    def make(size: int) -> list[Sent]:
        data = repeated(ELEMENTS[datatype], size - 1000)
        return [_json(f"echo_{datatype}", datatype, [data.count(",") + 1], data)]

    return make


def _strings(text: str) -> Callable[[int], list[Sent]]:
    def make(size: int) -> list[Sent]:
        data = repeated(json.dumps(text), size - 1000)
        return [_json("echo_BYTES", "BYTES", [data.count(",") + 1], data)]

    return make


def _some_strings(size: int) -> list[Sent]:
    """As many as a request may have, or as fit."""
    count = min((1 << 20) - 1, size // 6)
    return [_json("echo_BYTES", "BYTES", [count], ",".join(['"ab"'] * count))]


def _nested(size: int) -> list[Sent]:
    data = repeated("[[1]]", size - 1000)
    return [_json("echo_INT32", "INT32", [data.count(",") + 1, 1, 1], data)]


def _binary(datatype: str, raw: Callable[[int], bytes], shape: list[int] | None = None) -> Callable[[int], list[Sent]]:
    """With the shape that the bytes have, four to an element, or with `shape`. Asked for as bytes."""

    def make(size: int) -> list[Sent]:
        data = raw((size - 1000) // 20 * 20)
        tensor: dict[str, Any] = {"name": "IN", "datatype": datatype, "shape": shape or [len(data) // 4]}
        tensor["parameters"] = {"binary_data_size": len(data)}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {JSON_LENGTH: str(len(head))}
        return [HttpSent(_path(f"echo_{datatype}"), head + data, headers)]

    return make


def _binary_to_json(size: int) -> list[Sent]:
    """Small on its way in: the answer is what is large."""
    data = bytes(size // 4)
    tensor = {
        "name": "IN",
        "datatype": "FP32",
        "shape": [len(data) // 4],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    return [HttpSent(_path("echo_FP32"), head + data, {JSON_LENGTH: str(len(head))})]


def _with(more: Callable[[int], str]) -> Callable[[int], list[Sent]]:
    def make(size: int) -> list[Sent]:
        return [_json("echo_INT32", "INT32", [1], "7", "," + more(size - 1000))]

    return make


def _inputs(size: int) -> list[Sent]:
    tensor = '{"name":"IN","datatype":"INT32","shape":[1],"data":[7]}'
    return [HttpSent(_path("echo_INT32"), f'{{"inputs":[{repeated(tensor, size - 1000)}]}}'.encode())]


def _dimensions(size: int) -> list[Sent]:
    shape = repeated("1", size - 1000)
    body = f'{{"inputs":[{{"name":"IN","datatype":"INT32","shape":[{shape}],"data":[7]}}]}}'
    return [HttpSent(_path("echo_INT32"), body.encode())]


def _deep(size: int) -> list[Sent]:
    return [HttpSent(_path("echo_INT32"), b'{"inputs":' + b"[" * (size // 2 - 100) + b"]" * (size // 2 - 100) + b"}")]


def _classified(size: int) -> list[Sent]:
    data = bytes(size - 1000 - (size - 1000) % 4)
    tensor = {
        "name": "IN",
        "datatype": "FP32",
        "shape": [len(data) // 4],
        "parameters": {"binary_data_size": len(data)},
    }
    asked = {"name": "OUT", "parameters": {"classification": len(data) // 4}}
    head = json.dumps({"inputs": [tensor], "outputs": [asked]}).encode()
    return [HttpSent(_path("echo_FP32"), head + data, {JSON_LENGTH: str(len(head))})]


def _packed(make: Callable[[int], list[Sent]], how: Any) -> Callable[[int], list[Sent]]:
    return lambda size: [sent.compressed(how) for sent in make(size) if isinstance(sent, HttpSent)]


_ZEROS = _binary("BYTES", bytes, [1])
_ONES = _binary("BYTES", lambda size: b"\1\0\0\0x" * (size // 5), [1])
_AS_MANY = _binary("BYTES", bytes)  # a shape that fits: more strings than a request may have
HTTP_INFER_ATTACKS = (
    *(Attack(f"infer JSON {datatype}", _numbers(datatype)) for datatype in ELEMENTS),
    Attack("infer JSON FP32 gzip", _packed(_numbers("FP32"), "gzip")),
    Attack("infer JSON FP32 deflate", _packed(_numbers("FP32"), "deflate")),
    Attack("infer JSON nested", _nested),
    Attack("infer JSON empty strings", _strings("")),
    Attack("infer JSON one-letter strings", _strings("a")),
    Attack("infer JSON a million strings", _some_strings),
    Attack("infer JSON escapes", _strings("\x01\u00e9\U0001f600" * 100)),
    Attack("infer JSON deep", _deep),
    Attack("infer JSON many inputs", _inputs),
    Attack("infer JSON many dimensions", _dimensions),
    Attack("infer JSON many outputs", _with(lambda size: f'"outputs":[{numbered(_OUTPUT, size)}]')),
    Attack("infer JSON many parameters", _with(lambda size: f'"parameters":{{{numbered(MEMBER, size)}}}')),
    Attack("infer JSON huge id", _with(lambda size: f'"id":"{"i" * size}"')),
    Attack("infer JSON unknown members", _with(lambda size: numbered('"k%d":[[],{}]', size))),
    Attack(
        "infer JSON cut short",
        lambda size: [HttpSent(_path("echo_INT32"), b'{"inputs":[' + b'{"a":"b"},' * (size // 10))],
    ),
    Attack("infer binary FP32", _binary("FP32", bytes)),
    Attack("infer binary FP32 gzip", _packed(_binary("FP32", bytes), "gzip")),
    Attack("infer binary in, JSON out", _binary_to_json),
    Attack("infer binary empty strings", _ZEROS),
    Attack("infer binary empty strings gzip", _packed(_ZEROS, "gzip")),
    Attack("infer binary one-letter strings", _ONES),
    Attack("infer binary as many strings", _AS_MANY),
    Attack("infer binary a million strings", _binary("BYTES", bytes), most_bytes=4 << 20),
    Attack(
        "infer binary one string",
        _binary("BYTES", lambda size: (size - 4).to_bytes(4, "little") + bytes(size - 4), [1]),
    ),
    Attack("infer classification", _classified),
)
