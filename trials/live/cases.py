"""The cases: every model × every way to ask, right and wrong, made by rule and by a seeded generator.

For: the command. Does not know: the servers, or which answer is right. Invariant: the same seed gives the same cases in
the same order; a case depends on nothing but those before it.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from .case import Case, grpc_case, http_case, stream_case

MODELS = (
    "identity", "types", "matrix", "text", "repeat", "sequence_direct", "sequence_oldest", "batches", "queued",
    "cached", "pipeline", "stream_pipeline",
)  # fmt: skip
NUMPY_OF = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16,
    "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip


def all_cases(seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    yield from descriptions()
    yield from wrong_paths()
    yield from json_inference(draw)
    yield from binary_inference(draw)
    yield from broken_inference(draw)
    yield from generation(draw)
    yield from grpc_descriptions()
    yield from grpc_inference(draw)
    yield from grpc_broken()
    yield from streams(draw)
    yield from sequences(draw)
    yield from classification(draw)
    yield from the_cache()
    yield from settings()


# --- what is served -----------------------------------------------------------------------------------------------


def descriptions() -> Iterator[Case]:
    for path in ("/v2/health/live", "/v2/health/ready"):
        yield http_case(f"GET {path}", "GET", path)
    for model in MODELS:
        for suffix in ("", "/config", "/ready", "/versions/1", "/versions/1/ready", "/versions/1/config"):
            yield http_case(f"GET {model}{suffix}", "GET", f"/v2/models/{model}{suffix}")
    yield http_case("the index", "POST", "/v2/repository/index", {})
    yield http_case("the index of what is ready", "POST", "/v2/repository/index", {"ready": True})


def wrong_paths() -> Iterator[Case]:
    for path in (
        "/v2/models/absent", "/v2/models/absent/config", "/v2/models/absent/ready", "/v2/models/absent/stats",
        "/v2/models/identity/versions/9", "/v2/models/identity/versions/9/ready",
        "/v2/models/identity/versions/9/stats",
        "/v2/models/identity/versions/x", "/v2/models/identity/absent", "/v2/absent", "/absent", "/v2/health/absent",
        "/v2/models/broken", "/v2/models/broken/ready", "/v2/models/broken/config",
    ):  # fmt: skip
        yield http_case(f"GET {path}", "GET", path)
    for path in ("/v2/health/live", "/v2/models/identity", "/v2/models/identity/config"):
        yield http_case(f"POST {path}", "POST", path, {})
    for path in ("/v2/models/identity/infer", "/v2/models/text/generate", "/v2/repository/index"):
        yield http_case(f"GET {path}", "GET", path)
    for model in ("absent", "broken"):
        yield http_case(f"infer {model}", "POST", f"/v2/models/{model}/infer", {"inputs": []})
        yield http_case(f"load {model}", "POST", f"/v2/repository/models/{model}/load", {})
        yield http_case(f"unload {model}", "POST", f"/v2/repository/models/{model}/unload", {})


# --- infer over HTTP ----------------------------------------------------------------------------------------------


def tensor(name: str, datatype: str, shape: Sequence[int], data: Any, **parameters: Any) -> dict[str, Any]:
    made = {"name": name, "datatype": datatype, "shape": list(shape), "data": data}
    return made | ({"parameters": parameters} if parameters else {})


def numbers(draw: random.Random, count: int, low: int = -100, high: int = 100) -> list[int]:
    return [draw.randint(low, high) for _ in range(count)]


def random_values(draw: random.Random, datatype: str, count: int) -> list[Any]:
    if datatype == "BOOL":
        return [draw.random() < 0.5 for _ in range(count)]
    if datatype == "BYTES":
        return ["".join(draw.choice('abc äö€ \\"\n') for _ in range(draw.randint(0, 6))) for _ in range(count)]
    if datatype.startswith("FP"):
        return [draw.randint(-64, 64) / 8 for _ in range(count)]
    kind = np.iinfo(NUMPY_OF[datatype])
    return [draw.choice((int(kind.min), int(kind.max), draw.randint(0, 100))) for _ in range(count)]


def infer(name: str, model: str, body: Any, **headers: str) -> Case:
    return http_case(name, "POST", f"/v2/models/{model}/infer", body, headers)


def json_inference(draw: random.Random) -> Iterator[Case]:
    for number in range(8):
        rows = draw.randint(1, 8)
        data = [value / 4 for value in numbers(draw, rows * 4)]
        body: dict[str, Any] = {"inputs": [tensor("INPUT0", "FP32", (rows, 4), data)]}
        if number % 2:
            body |= {"id": f"id-{number}", "outputs": [{"name": "OUTPUT0"}]}
        yield infer(f"identity {rows} rows", "identity", body)
    for datatype in (*NUMPY_OF, "BYTES"):
        name = "STRING" if datatype == "BYTES" else datatype
        for count in (0, 1, 3):
            values = random_values(draw, datatype, count)
            body = {"inputs": [tensor(f"IN_{name}", datatype, (count,), values)]}
            yield infer(f"types {datatype} {count}", "types", body)
    for number in range(6):
        rows, width = draw.randint(1, 3), draw.randint(1, 3)
        a, b = (numbers(draw, rows * 2 * width) for _ in range(2))
        shape = (rows, 2, width)
        body = {"inputs": [tensor("A", "INT32", shape, a), tensor("B", "INT32", shape, b)]}
        yield infer(f"matrix {shape}", "matrix", body)
        nested = np.array(a).reshape(shape).tolist()
        body = {"inputs": [tensor("B", "INT32", shape, b), tensor("A", "INT32", shape, nested)], "id": str(number)}
        yield infer(f"matrix {shape} nested", "matrix", body | {"outputs": [{"name": "DIFFERENCE"}]})
    for parameters in (
        {"a": 1, "b": "x", "c": True}, {"priority": 3}, {"timeout": 1000000}, {"sequence_id": 5}, {"sequence_id": "s"},
        {"sequence_start": True}, {"double": 1.5}, {"list": [1]}, {"none": None}, {"triton_x": 1},
        {"binary_data_output": True}, {"timeout": "soon"}, {"priority": -1}, {"sequence_start": 1},
    ):  # fmt: skip
        body = {"inputs": [tensor("IN_INT32", "INT32", (1,), [1])], "parameters": parameters}
        yield infer(f"types with parameters {parameters}", "types", body)
    for number in range(3):
        left, right = (tensor(name, "INT32", (1, 2, 4), numbers(draw, 8)) for name in ("LEFT", "RIGHT"))
        yield infer(f"pipeline {number}", "pipeline", {"inputs": [left, right], "id": f"p{number}"})
    left, right = (tensor(name, "INT32", (2, 2, 4), numbers(draw, 16)) for name in ("LEFT", "RIGHT"))
    yield infer("pipeline, one output", "pipeline", {"inputs": [left, right], "outputs": [{"name": "TOTAL"}]})


def binary(header: dict[str, Any], *chunks: bytes) -> tuple[bytes, dict[str, str]]:
    text = json.dumps(header).encode()
    return text + b"".join(chunks), {"Inference-Header-Content-Length": str(len(text))}


def packed(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)
    return np.array(values, NUMPY_OF[datatype]).tobytes()


def binary_inference(draw: random.Random) -> Iterator[Case]:
    for datatype in (*NUMPY_OF, "BYTES"):
        name = "STRING" if datatype == "BYTES" else datatype
        values = random_values(draw, datatype, 3)
        chunk = packed(datatype, values)
        described = {"name": f"IN_{name}", "datatype": datatype, "shape": [3]}
        sized = described | {"parameters": {"binary_data_size": len(chunk)}}
        for outputs in ({"binary_data_output": True}, {}):
            body, headers = binary({"inputs": [sized], "parameters": outputs}, chunk)
            yield http_case(f"binary {datatype} {outputs}", "POST", "/v2/models/types/infer", body, headers)
    chunk = packed("FP32", [1, 2, 3, 4])
    one = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    for name, header, data, length in (
        ("too little data", {"inputs": [one]}, chunk[:-4], None),
        ("too much data", {"inputs": [one]}, chunk + b"\0", None),
        ("a wrong size", {"inputs": [one | {"parameters": {"binary_data_size": 12}}]}, chunk[:12], None),
        ("size and data", {"inputs": [one | {"data": [1, 2, 3, 4]}]}, chunk, None),
        ("a size that is a text", {"inputs": [one | {"parameters": {"binary_data_size": "16"}}]}, chunk, None),
        ("a header beyond the body", {"inputs": [one]}, chunk, "9999"),
        ("a header that is no number", {"inputs": [one]}, chunk, "many"),
        ("a negative header", {"inputs": [one]}, chunk, "-1"),
        ("a header cut short", {"inputs": [one]}, chunk, "10"),
    ):
        body, headers = binary(header, data)
        if length is not None:
            headers = {"Inference-Header-Content-Length": length}
        yield http_case(f"binary: {name}", "POST", "/v2/models/identity/infer", body, headers)
    for raw in (chunk, chunk * 2, chunk[:-1], b""):
        headers = {"Inference-Header-Content-Length": "0"}
        yield http_case(f"raw body of {len(raw)} bytes", "POST", "/v2/models/identity/infer", raw, headers)


def broken_inference(draw: random.Random) -> Iterator[Case]:
    right = tensor("INPUT0", "FP32", (1, 4), [1, 2, 3, 4])
    for field in ("name", "datatype", "shape", "data"):
        yield infer(f"no {field}", "identity", {"inputs": [{key: right[key] for key in right if key != field}]})
        value: Any
        for value in (None, 7, "x", [], {}, True, [1.5], -1):
            yield infer(f"{field} is {value!r}", "identity", {"inputs": [right | {field: value}]})
    for shape in ([4], [1, 5], [0, 4], [9, 4], [1, 4, 1], [2, 4], [-1, 4]):  # [1, 2**40] ends a Triton 2.51
        yield infer(f"shape {shape}", "identity", {"inputs": [right | {"shape": shape}]})
    for datatype in ("INT32", "FP16", "BYTES", "BF16", "fp32", "FP8"):
        yield infer(f"datatype {datatype}", "identity", {"inputs": [right | {"datatype": datatype}]})
    body: Any
    for body in (
        {}, {"inputs": []}, {"inputs": {}}, {"inputs": None}, {"inputs": [right, right]}, [], "text", 5,
        {"inputs": [right], "outputs": [{"name": "ABSENT"}]}, {"inputs": [right], "outputs": [{}]},
        {"inputs": [right], "outputs": "OUTPUT0"}, {"inputs": [right], "id": 5}, {"inputs": [right], "absent": 1},
        {"inputs": [right | {"name": "ABSENT"}]}, {"inputs": [right], "parameters": []},
    ):  # fmt: skip
        yield infer(f"body {json.dumps(body)[:70]}", "identity", body)
    twice = {"inputs": [right], "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]}
    yield infer("an output asked for twice", "identity", twice)
    for raw in (b"", b"{", b"{]}", b"\xff\xfe", b'{"inputs": [}', b"null", b"{} {}"):
        yield infer(f"raw body {raw!r}", "identity", raw)
    for data in (
        ["x", 2, 3, 4],
        [True, 1, 1, 1],
        [1, 2, 3],
        [1, 2, 3, 4, 5],
        [[1, 2], [3]],
        [None] * 4,
        [1e400, 0, 0, 0],
    ):
        text = json.dumps({"inputs": [right | {"data": data}]}).replace("Infinity", "1e400")
        yield infer(f"data {data}", "identity", text.encode())
    yield infer("other shapes than the model takes", "matrix", {
        "inputs": [tensor("A", "INT32", (1, 2, 1), [1, 2]), tensor("B", "INT32", (1, 2, 2), [1, 2, 3, 4])]
    })  # fmt: skip
    yield infer("batches that differ", "matrix", {
        "inputs": [tensor("A", "INT32", (1, 2, 1), [1, 2]), tensor("B", "INT32", (2, 2, 1), [1, 2, 3, 4])]
    })  # fmt: skip
    yield infer("one input is missing", "matrix", {"inputs": [tensor("A", "INT32", (1, 2, 1), [1, 2])]})
    yield infer("a decoupled model", "repeat", {"inputs": [tensor("text_input", "BYTES", (1,), ["x"])]})
    for text in ("fail", "fail INVALID_ARG", "fail NOT_FOUND", "fail UNAVAILABLE", "fail UNSUPPORTED", "fail CANCELLED",
                 "fail ALREADY_EXISTS", "fail UNKNOWN", "raise"):  # fmt: skip
        yield infer(f"the model: {text}", "text", {"inputs": [tensor("text_input", "BYTES", (1,), [text])]})


# --- generate -----------------------------------------------------------------------------------------------------


def generation(draw: random.Random) -> Iterator[Case]:
    bodies: list[Any] = [
        {"text_input": "hello"}, {"text_input": "hello", "id": "7"}, {"text_input": ["hello"]},
        {"text_input": "hello", "max_tokens": 5, "stream": False}, {"text_input": "hello", "temperature": 0.5},
        {"text_input": "hello", "parameters": {"max_tokens": 3, "temperature": 1}}, {"text_input": "ä€\n\"\\"},
        {"text_input": "x", "stop": ["a", "b"]}, {"text_input": "x", "stop": "a"}, {"text_input": "x", "stop": []},
        {"text_input": "x", "unknown": 5}, {"text_input": "x", "unknown": "y"}, {"text_input": "x", "unknown": True},
        {"text_input": "x", "unknown": 1.5}, {"text_input": "x", "unknown": [1]}, {"text_input": "x", "unknown": {}},
        {"text_input": "x", "unknown": None}, {"text_input": 5}, {"text_input": None}, {"text_input": {}},
        {"text_input": []}, {"text_input": ["a", "b"]}, {}, {"max_tokens": 5}, {"text_input": "x", "max_tokens": "5"},
        {"text_input": "x", "max_tokens": 1.5}, {"text_input": "x", "max_tokens": 2**40},
        {"text_input": "x", "max_tokens": [1, 2]}, {"text_input": "x", "stream": "yes"}, {"text_input": "x",
        "stream": 1},
        {"text_input": "x", "parameters": 5}, {"text_input": "x", "parameters": {"nested": {"a": 1}}},
        {"text_input": "fail"}, {"text_input": "fail UNAVAILABLE"}, {"text_input": "raise"}, {"text_input": ""},
        {"text_input": "x", "priority": 1}, {"text_input": "x", "timeout": 5}, {"text_input": "x", "id": 5}, [], "x", 5,
    ]  # fmt: skip
    bodies += [b"", b"{", b'{"text_input": "a", "text_input": "b"}', b"\xff"]
    for body in bodies:
        for way in ("generate", "generate_stream"):
            yield http_case(f"{way} {body!r}"[:90], "POST", f"/v2/models/text/{way}", body)
    for text in ("some", "early", "late", "joined", "late joined"):
        for count in (0, 1, 2, 5):
            for way in ("generate", "generate_stream"):
                body = {"text_input": text, "COUNT": count}
                yield http_case(f"{way} repeat {text} {count}", "POST", f"/v2/models/repeat/{way}", body)
    for count in (0, 1, 3):
        body = {"text_input": "through", "COUNT": count}
        yield http_case(f"pipeline of streams {count}", "POST", "/v2/models/stream_pipeline/generate_stream", body)
    for model in ("absent", "broken", "matrix"):
        yield http_case(f"generate {model}", "POST", f"/v2/models/{model}/generate", {"text_input": "x"})
        yield http_case(f"stream {model}", "POST", f"/v2/models/{model}/generate_stream", {"text_input": "x"})
    yield http_case("generate version 9", "POST", "/v2/models/text/versions/9/generate", {"text_input": "x"})
    yield http_case("generate version 1", "POST", "/v2/models/text/versions/1/generate", {"text_input": "x"})
    yield http_case(
        "generate, compressed", "POST", "/v2/models/text/generate", b"\x1f\x8b", {"content-encoding": "gzip"}
    )


# --- gRPC ---------------------------------------------------------------------------------------------------------


def grpc_descriptions() -> Iterator[Case]:
    yield grpc_case("ServerLive", "ServerLive", pb.ServerLiveRequest())
    yield grpc_case("ServerReady", "ServerReady", pb.ServerReadyRequest())
    for model in (*MODELS, "absent", "broken"):
        for version in ("", "1", "9", "x"):
            yield grpc_case(
                f"ModelReady {model} {version}", "ModelReady", pb.ModelReadyRequest(name=model, version=version)
            )
        yield grpc_case(f"ModelMetadata {model}", "ModelMetadata", pb.ModelMetadataRequest(name=model))
        yield grpc_case(f"ModelConfig {model}", "ModelConfig", pb.ModelConfigRequest(name=model))
    for version in ("9", "x"):
        yield grpc_case(f"metadata {version}", "ModelMetadata", pb.ModelMetadataRequest(name="text", version=version))
    yield grpc_case("RepositoryIndex", "RepositoryIndex", pb.RepositoryIndexRequest())
    yield grpc_case("RepositoryIndex ready", "RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
    yield grpc_case("load absent", "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="absent"))
    yield grpc_case("load broken", "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="broken"))


def request(
    model: str,
    inputs: Sequence[tuple[str, str, Sequence[int], Sequence[Any]]],
    outputs: Sequence[str] = (),
    **fields: Any,
) -> pb.ModelInferRequest:
    """Inputs as (name, datatype, shape, values), sent as raw bytes."""
    message = pb.ModelInferRequest(model_name=model, **fields)
    for name, datatype, shape, values in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(packed(datatype, values))
    for name in outputs:
        message.outputs.add(name=name)
    return message


def text_request(model: str, text: str, count: int | None = None, **fields: Any) -> pb.ModelInferRequest:
    inputs: list[tuple[str, str, Sequence[int], Sequence[Any]]] = [("text_input", "BYTES", (1,), [text])]
    if count is not None:
        inputs.append(("COUNT", "INT32", (1,), [count]))
    return request(model, inputs, **fields)


def grpc_inference(draw: random.Random) -> Iterator[Case]:
    for datatype in (*NUMPY_OF, "BYTES"):
        name = "STRING" if datatype == "BYTES" else datatype
        for count in (0, 2):
            values = random_values(draw, datatype, count)
            message = request("types", [(f"IN_{name}", datatype, (count,), values)], id=f"{datatype}")
            yield grpc_case(f"infer {datatype} {count}", "ModelInfer", message)
    for number in range(6):
        rows = draw.randint(1, 3)
        shape = (rows, 2, 2)
        inputs = [(name, "INT32", shape, numbers(draw, rows * 4)) for name in ("A", "B")]
        outputs = ([], ["SUM"], ["DIFFERENCE", "SUM"])[number % 3]
        yield grpc_case(f"matrix {shape} {outputs}", "ModelInfer", request("matrix", inputs, outputs))
    typed = pb.ModelInferRequest(model_name="types")
    typed.inputs.add(name="IN_INT32", datatype="INT32", shape=[2]).contents.int_contents.extend([1, 2])
    typed.inputs.add(name="IN_BOOL", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    typed.inputs.add(name="IN_STRING", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    typed.inputs.add(name="IN_FP64", datatype="FP64", shape=[1]).contents.fp64_contents.append(0.5)
    yield grpc_case("typed contents", "ModelInfer", typed)
    for key, value in (
        ("own", {"int64_param": 5}), ("own", {"string_param": "x"}), ("own", {"bool_param": True}),
        ("own", {"double_param": 0.5}), ("own", {"uint64_param": 5}), ("priority", {"uint64_param": 1}),
        ("priority", {"int64_param": -1}), ("timeout", {"int64_param": 9}), ("timeout", {"string_param": "x"}),
        ("sequence_id", {"string_param": "s"}), ("sequence_id", {"int64_param": 3}), ("sequence_start",
        {"bool_param": True}),
        ("sequence_start", {"int64_param": 1}), ("triton_own", {"int64_param": 1}),
    ):  # fmt: skip
        message = request("types", [("IN_INT32", "INT32", (1,), [1])])
        message.parameters[key].MergeFrom(pb.InferParameter(**value))
        yield grpc_case(f"parameter {key} {value}", "ModelInfer", message)
    inputs = [(name, "INT32", (1, 2, 4), numbers(draw, 8)) for name in ("LEFT", "RIGHT")]
    yield grpc_case("pipeline", "ModelInfer", request("pipeline", inputs, id="ensemble"))


def grpc_broken() -> Iterator[Case]:
    right = ("INPUT0", "FP32", (1, 4), [1, 2, 3, 4])
    for name, inputs in (
        ("no input", []), ("an unknown input", [("ABSENT", "FP32", (1, 4), [1, 2, 3, 4])]),
        ("a wrong datatype", [("INPUT0", "INT32", (1, 4), [1, 2, 3, 4])]),
        ("a wrong shape", [("INPUT0", "FP32", (1, 5), [1, 2, 3, 4, 5])]),
        ("too few bytes", [("INPUT0", "FP32", (1, 4), [1, 2, 3])]),
        ("too many rows", [("INPUT0", "FP32", (9, 4), [0] * 36)]), ("no batch", [("INPUT0", "FP32", (4,), [1,
        2, 3, 4])]),
        ("twice the same", [right, right]), ("a negative shape", [("INPUT0", "FP32", (-1, 4), [1, 2, 3, 4])]),
    ):  # fmt: skip
        yield grpc_case(f"infer: {name}", "ModelInfer", request("identity", inputs))
        yield stream_case(f"stream: {name}", [request("identity", inputs, id="s")])
    for model, version in (("absent", ""), ("broken", ""), ("identity", "9"), ("identity", "x"), ("repeat", "")):
        message = request(model, [right], model_version=version)
        yield grpc_case(f"infer {model} {version}", "ModelInfer", message)
        if model != "repeat":
            yield stream_case(f"stream {model} {version}", [message])
    yield grpc_case("an unknown output", "ModelInfer", request("identity", [right], ["ABSENT"]))
    both = request("identity", [right])
    both.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])
    yield grpc_case("raw and typed contents", "ModelInfer", both)
    for text in ("fail", "fail INVALID_ARG", "fail NOT_FOUND", "fail UNAVAILABLE", "fail UNSUPPORTED", "fail CANCELLED",
                 "fail ALREADY_EXISTS", "raise"):  # fmt: skip
        yield grpc_case(f"infer text: {text}", "ModelInfer", text_request("text", text, id="t"))


def streams(draw: random.Random) -> Iterator[Case]:
    for text in ("some", "early", "late", "joined"):
        for count in (0, 1, 3):
            yield stream_case(f"stream {text} {count}", [text_request("repeat", text, count, id=f"{text}{count}")])
    for text in ("some", "joined", "early"):
        message = text_request("repeat", text, 2, id="e")
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        yield stream_case(f"an empty final response, {text}", [message])
        strict = (("triton_grpc_error", "true"),)
        yield stream_case(f"errors as status, {text}", [text_request("repeat", text, 2, id="g")], strict)
    for model in ("text", "identity"):
        message = (
            text_request("text", "hello")
            if model == "text"
            else request(model, [("INPUT0", "FP32", (1, 4), [1, 2, 3, 4])])
        )
        yield stream_case(f"stream of {model}", [message] * 2)
    # Slow: with the producer's end at the heels of its last response, the final flag travels with that one or alone.
    for count in (0, 1, 4):
        yield stream_case(
            f"stream through a pipeline {count}", [text_request("stream_pipeline", "slow", count, id="p")]
        )
    for number in range(8):
        text, count = draw.choice(("some", "late", "joined")), draw.randint(0, 6)
        yield stream_case(f"a random stream {number}", [text_request("repeat", text, count, id=f"r{number}")])


def sequences(draw: random.Random) -> Iterator[Case]:
    for model in ("sequence_direct", "sequence_oldest"):
        for sequence in (11, 12):
            xs = numbers(draw, 4)
            for index, x in enumerate(xs):
                parameters: dict[str, Any] = {
                    "sequence_id": sequence, "sequence_start": index == 0, "sequence_end": index == len(xs) - 1
                }  # fmt: skip
                body = {"inputs": [tensor("X", "INT32", (1, 1), [x])], "parameters": parameters}
                yield infer(f"{model} {sequence} {index}", model, body)
        for name, parameters in (
            ("no sequence id", {}), ("sequence id 0", {"sequence_id": 0}), ("no start", {"sequence_id": 77}),
            ("no start, but an end", {"sequence_id": 78, "sequence_end": True}),
            ("start and end", {"sequence_id": 79, "sequence_start": True, "sequence_end": True}),
            ("after its end", {"sequence_id": 79}), ("an empty text", {"sequence_id": "", "sequence_start": True}),
        ):  # fmt: skip
            body = {"inputs": [tensor("X", "INT32", (1, 1), [1])], "parameters": parameters}
            yield infer(f"{model}: {name}", model, body)
        body = {
            "inputs": [tensor("X", "INT32", (2, 1), [1, 1])],
            "parameters": {"sequence_id": 5, "sequence_start": True},
        }
        yield infer(f"{model}: two rows", model, body)
        messages = []
        for index, x in enumerate(numbers(draw, 3)):
            message = request(model, [("X", "INT32", (1, 1), [x])])
            message.parameters["sequence_id"].int64_param = 21
            message.parameters["sequence_start"].bool_param = index == 0
            message.parameters["sequence_end"].bool_param = index == 2
            messages.append(message)
        yield stream_case(f"{model} over a stream", messages)


def classification(draw: random.Random) -> Iterator[Case]:
    rows = [value / 4 for value in draw.sample(range(100), 8)]
    one = tensor("INPUT0", "FP32", (2, 4), rows)
    for count in (1, 2, 4, 9, 0, -1, "x"):
        body = {"inputs": [one], "outputs": [{"name": "OUTPUT0", "parameters": {"classification": count}}]}
        yield infer(f"classification {count}", "identity", body)
        if isinstance(count, int):
            message = request("identity", [("INPUT0", "FP32", (2, 4), rows)])
            message.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = count
            yield grpc_case(f"classification {count} over gRPC", "ModelInfer", message)


def the_cache() -> Iterator[Case]:
    for values in ([1, 2], [1, 2], [3, 4], [1, 2], [3, 4]):
        body = {"inputs": [tensor("X", "FP32", (1, 2), values)]}
        yield infer(f"cached {values}", "cached", body)
    message = request("cached", [("X", "FP32", (1, 2), [1, 2])], id="other")
    yield grpc_case("cached over gRPC", "ModelInfer", message)


def settings() -> Iterator[Case]:
    for path in (
        "/v2/trace/setting",
        "/v2/models/text/trace/setting",
        "/v2/models/absent/trace/setting",
        "/v2/logging",
    ):
        yield http_case(f"GET {path}", "GET", path)
    body: dict[str, Any]
    for body in ({"trace_rate": "5"}, {"trace_rate": "x"}, {"trace_level": ["TIMESTAMPS"]},
                 {"trace_level": ["NOTHING"]},
                 {"trace_count": "-2"}, {"trace_file": "x"}, {"trace_rate": None}, {"absent": "1"}, {"trace_rate": 5},
                 {"trace_level": ["OFF"]}):  # fmt: skip
        yield http_case(f"trace setting {body}", "POST", "/v2/models/text/trace/setting", body)
    for body in ({"log_verbose_level": 1}, {"log_verbose_level": 0}, {"log_info": True}, {"log_info": "x"},
                 {"log_format": "ISO8601"}, {"log_format": "default"}, {"log_format": "x"}, {"log_file": "x"},
                 {"absent": 1}):  # fmt: skip
        yield http_case(f"logging {body}", "POST", "/v2/logging", body)
    for kind in ("systemsharedmemory", "cudasharedmemory"):
        yield http_case(f"{kind} status", "GET", f"/v2/{kind}/status")
        yield http_case(f"{kind} unknown region", "GET", f"/v2/{kind}/region/absent/status")
        yield http_case(f"{kind} unregister", "POST", f"/v2/{kind}/unregister", {})
        yield http_case(f"{kind} unregister one", "POST", f"/v2/{kind}/region/absent/unregister", {})
    absent = {"key": "/absent-in-conformance-live", "byte_size": 16}
    yield http_case("register an absent key", "POST", "/v2/systemsharedmemory/region/r/register", absent)
    yield http_case("register nothing", "POST", "/v2/systemsharedmemory/region/r/register", {})
    yield grpc_case("shared memory status", "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest())
    yield grpc_case("trace settings", "TraceSetting", pb.TraceSettingRequest())
    yield grpc_case("log settings", "LogSettings", pb.LogSettingsRequest())
