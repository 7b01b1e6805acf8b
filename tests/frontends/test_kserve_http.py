"""KServe v2 over HTTP with raw requests: status, content type, body. Expectations are the recorded transcripts."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.helpers.kserve_runner import Running

JSON, TEXT = "application/json", "text/plain"
LIMIT = 1 << 20
RAW = struct.pack("<4f", 1, 2, 3, 4)
INPUT: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
BINARY: dict[str, Any] = {**INPUT, "parameters": {"binary_data_size": 16}}
del BINARY["data"]
ANSWER = (
    '{"model_name":"identity","model_version":"1","outputs":'
    '[{"name":"OUTPUT0","datatype":"FP32","shape":[1,4],"data":[1.0,2.0,3.0,4.0]}]}'
)


HOST_OPTIONS = {"max_input_size_bytes": LIMIT}


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    headers = {"accept-encoding": "identity"}
    with httpx.Client(base_url=f"http://{running.http}", headers=headers, timeout=20) as client:
        yield client


def infer(client: httpx.Client, body: Any, model: str = "identity", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/v2/models/{model}/infer", content=content, headers=headers)


def infer_binary(client: httpx.Client, header: Any, raw: bytes, model: str = "identity", **more: str) -> httpx.Response:
    text = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))} | more
    return client.post(f"/v2/models/{model}/infer", content=text + raw, headers=headers)


def error_of(response: httpx.Response) -> str:
    return str(response.json()["error"])


@pytest.mark.parametrize(
    "path",
    ["/v2/health/live", "/v2/health/ready", "/v2/models/identity/ready", "/v2/models/identity/versions/1/ready"],
)
def test_health_is_an_empty_200(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert (response.status_code, response.content, response.headers["content-type"]) == (200, b"", TEXT)


@pytest.mark.parametrize("model", ["identity/versions/7", "nosuch"])
def test_a_model_that_is_not_ready(client: httpx.Client, model: str) -> None:
    response = client.get(f"/v2/models/{model}/ready")
    assert (response.status_code, response.text) == (400, '{"error":"Model version not ready"}')


@pytest.mark.parametrize(
    ("method", "path", "status", "content_type"),
    [
        ("GET", "/v2/", 404, TEXT),
        ("GET", "/v2/nosuch", 404, TEXT),
        ("GET", "/v2/health", 404, TEXT),
        ("GET", "/v2/health/live/", 404, TEXT),
        ("GET", "/v2/models/identity/nosuch", 404, TEXT),
        ("GET", "/v2/models/identity/versions/abc/ready", 404, TEXT),
        ("GET", f"/v2/models/identity/versions/{'9' * 5000}", 404, TEXT),
        ("POST", "/v2/health/live", 405, TEXT),
        ("HEAD", "/v2/health/live", 405, TEXT),
        ("GET", "/v2/models/identity/infer", 405, TEXT),
        ("OPTIONS", "/v2/models/identity/infer", 405, TEXT),
        ("DELETE", "/v2/models/identity", 405, JSON),
        ("POST", "/v2", 405, JSON),
        ("GET", "/v2/models/llm/generate", 405, JSON),
        ("GET", "/v2/repository/index", 405, JSON),
        ("GET", "/v2/repository/models/identity/load", 405, JSON),
    ],
)
def test_unknown_paths_and_wrong_methods(
    client: httpx.Client, method: str, path: str, status: int, content_type: str
) -> None:
    response = client.request(method, path)
    body = '{"error":"Not Found"}' if status == 404 else '{"error":"Method Not Allowed"}'
    assert (response.status_code, response.headers["content-type"]) == (status, content_type)
    assert response.headers["content-length"] == str(len(body))
    assert response.text == ("" if method == "HEAD" else body)


def test_the_root_says_what_to_ask_for(client: httpx.Client) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, TEXT)
    paths = [line.split()[1] for line in answer.text.splitlines()[1:]]
    assert "/v2/models/{model}/generate" in paths and "/openapi.json" in paths
    assert "/v1/chat/completions" in paths


def test_metadata(client: httpx.Client) -> None:
    server = client.get("/v2").json()
    assert list(server) == ["name", "version", "extensions"] and "binary_tensor_data" in server["extensions"]
    assert client.get("/v2/models/identity").text == (
        '{"name":"identity","versions":["1"],"platform":"scripted",'
        '"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[-1,4]}],'
        '"outputs":[{"name":"OUTPUT0","datatype":"FP32","shape":[-1,4]}]}'
    )
    missing = client.get("/v2/models/identity/versions/9")
    assert (missing.status_code, missing.headers["content-type"]) == (404, JSON)
    assert error_of(missing) == "Request for unknown model: 'identity' version 9 is not found"


def test_config(client: httpx.Client) -> None:
    config = client.get("/v2/models/llm/config").json()
    assert config["name"] == "llm" and config["input"][0]["dims"] == [1]
    assert config["model_transaction_policy"] == {"decoupled": True}


def test_statistics_are_numbers_in_tritons_order(client: httpx.Client) -> None:
    response = client.get("/v2/models/identity/stats")
    row = response.json()["model_stats"][0]
    assert list(row) == [
        *("name", "version", "last_inference", "inference_count", "execution_count", "inference_stats"),
        *("response_stats", "batch_stats", "memory_usage"),
    ]
    assert row["name"] == "identity" and row["version"] == "1"
    assert list(row["inference_stats"]["success"]) == ["count", "ns"]
    assert type(row["inference_stats"]["success"]["ns"]) is int
    assert client.get("/v2/models/stats").status_code == 200
    unknown = client.get("/v2/models/nosuch/stats")
    assert (unknown.status_code, error_of(unknown)) == (400, "requested model 'nosuch' is not available")


def test_statistics_are_collected_beside_the_event_loop(
    running: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, threads = running.host.model_statistics, list[str]()

    def noting(*model: Any) -> Any:
        threads.append(threading.current_thread().name)
        return collect(*model)

    monkeypatch.setattr(running.host, "model_statistics", noting)
    for path in ("/v2/models/stats", "/v2/models/identity/stats"):
        assert client.get(path).status_code == 200
    with grpc.insecure_channel(running.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelStatistics(pb.ModelStatisticsRequest(name="identity")).model_stats
    assert len(threads) == 3 and "frontends" not in threads


def test_repository_index(client: httpx.Client) -> None:
    rows = client.post("/v2/repository/index").json()
    assert rows[0] == {"name": "bad"} and rows[1] == {"name": "identity", "version": "1", "state": "READY"}
    ready = client.post("/v2/repository/any/index", content=b'{"ready":true}').json()
    assert [row["name"] for row in ready] == ["identity", "llm", "multi", "textid"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("index", '{"ready":"x"}', "attempt to access JSON non-boolean as boolean"),
        ("index", "notjson", "failed to parse the request JSON buffer: Invalid value. at 1"),
        ("models/identity/load", "notjson", "failed to parse the request JSON buffer: Invalid value. at 1"),
        ("models/identity/load", '{"parameters":{"config":{"a":1}}}', "attempt to access JSON non-string as string"),
        ("models/identity/load", '{"parameters":{"nosuch":"1"}}', "unexpected error on creating Triton parameter"),
        ("models/nosuch/load", "", "failed to load 'nosuch', failed to poll from model repository"),
    ],
)
def test_repository_errors(client: httpx.Client, path: str, body: str, message: str) -> None:
    response = client.post(f"/v2/repository/{path}", content=body)
    assert (response.status_code, response.headers["content-type"], error_of(response)) == (500, JSON, message)


def test_load_and_unload(client: httpx.Client) -> None:
    config = client.get("/v2/models/identity/config").json() | {"name": "spare", "max_batch_size": 2}
    parameters = {"config": json.dumps(config), "file:1/note.txt": base64.b64encode(b"note").decode()}
    loaded = client.post("/v2/repository/models/spare/load", json={"parameters": parameters})
    assert (loaded.status_code, loaded.content, loaded.headers["content-type"]) == (200, b"", JSON)
    assert client.get("/v2/models/spare/config").json()["max_batch_size"] == 2
    unloaded = client.post("/v2/repository/models/spare/unload", json={"parameters": {"unload_dependents": True}})
    assert (unloaded.status_code, client.get("/v2/models/spare/ready").status_code) == (200, 400)
    broken = client.post("/v2/repository/models/spare/load", json={"parameters": {"config": "{}", "file:1/x": "?"}})
    assert broken.status_code == 400 and "'file:1/x' is not base64" in error_of(broken)
    named = client.post("/v2/repository/r/models/m/load")
    assert (named.status_code, error_of(named)) == (501, "'repository_name' specification is not supported")


def test_infer_json(client: httpx.Client) -> None:
    response = infer(client, {"inputs": [INPUT], "foo": 1})
    assert (response.status_code, response.headers["content-type"], response.text) == (200, JSON, ANSWER)
    nested = {**INPUT, "shape": [2, 4], "data": [[1, 2, 3, 4], [5.5, 6, 7, 1e-3]]}
    response = infer(client, {"id": "req-1", "inputs": [nested], "outputs": [{"name": "OUTPUT0"}]})
    assert response.text == (
        '{"id":"req-1","model_name":"identity","model_version":"1","outputs":[{"name":"OUTPUT0","datatype":"FP32",'
        '"shape":[2,4],"data":[1.0,2.0,3.0,4.0,5.5,6.0,7.0,0.0010000000474974513]}]}'
    )  # Triton writes …514: another text of the same double


def test_infer_carries_nan_and_infinity(client: httpx.Client) -> None:
    body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[NaN,Infinity,-Infinity,1e999]}]}'
    assert '"data":[NaN,Infinity,-Infinity,Infinity]' in infer(client, body.replace(b"1e999", b"1e300")).text


def test_request_parameters_reach_the_model(client: httpx.Client) -> None:
    inputs = [
        {"name": "S", "datatype": "BYTES", "shape": [2], "data": ["héllo", "w"]},
        {"name": "I", "datatype": "INT32", "shape": [2, 1], "data": [[1], [-2]]},
    ]
    parameters = {"s": "v", "i": 7, "b": True, "f": 1.5, "sequence_id": 9, "sequence_start": True}
    parameters |= {"sequence_end": True, "priority": 1, "timeout": 5000000}
    response = infer(client, {"id": "42", "parameters": parameters, "inputs": inputs}, "multi")
    outputs = {output["name"]: output["data"] for output in response.json()["outputs"]}
    assert outputs["S"] == ["héllo", "w"] and outputs["I"] == [1, -2]
    assert json.loads(outputs["PARAMS"][0]) == {
        "params": {"s": "v", "i": 7, "b": True, "f": 1.5},
        "id": "42",
        "B": None,
        "corr": "9",
        "priority": 1,
        "timeout": 5000000,
        "flags": 3,
    }


def test_binary_tensors(client: httpx.Client) -> None:
    assert infer_binary(client, {"inputs": [BINARY]}, RAW).text == ANSWER
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    response = infer_binary(client, {"inputs": [BINARY], "outputs": outputs}, RAW)
    length = int(response.headers["inference-header-content-length"])
    assert (response.headers["content-type"], length, response.content[length:]) == (
        *("application/octet-stream", 145),
        RAW,
    )
    response = infer_binary(client, {"id": "b", "inputs": [BINARY], "parameters": {"binary_data_output": True}}, RAW)
    assert response.headers["inference-header-content-length"] == "154"
    response = client.post("/v2/models/identity/infer", content=RAW, headers={"Inference-Header-Content-Length": "0"})
    assert response.content[145:] == RAW


def test_binary_strings(client: httpx.Client) -> None:
    strings = b"".join(struct.pack("<I", len(item)) + item for item in (b"ab", b"\xff\x00c"))
    header = {
        "inputs": [
            {"name": "S", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(strings)}},
            {"name": "I", "datatype": "INT32", "shape": [2, 1], "data": [1, 2]},
        ],
        "outputs": [{"name": "S", "parameters": {"binary_data": True}}, {"name": "I"}],
    }
    response = infer_binary(client, header, strings, "multi")
    assert response.headers["inference-header-content-length"] == "194"
    assert response.content[194:] == strings


@pytest.mark.parametrize(
    ("header", "raw", "length", "message"),
    [
        (
            [BINARY],
            RAW[:12],
            None,
            "unexpected size for input 'INPUT0', expecting 4 additional bytes for model 'identity'",
        ),
        ([BINARY], RAW + b"zz", None, "unexpected additional input data for model 'identity'"),
        (
            *([{**BINARY, "parameters": {"binary_data_size": 12}}], RAW[:12], None),
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'identity'. "
            "Expected 16, got 12",
        ),
        ([BINARY], RAW, "99999", "inference header size should be in range (0, 115), got: 99999"),
        (
            *([BINARY], RAW, "abc"),
            "[request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model 'identity'. "
            "Expected 16, got 115",
        ),
    ],
)
def test_binary_errors(client: httpx.Client, header: Any, raw: bytes, length: str | None, message: str) -> None:
    text = json.dumps({"inputs": header}, separators=(",", ":")).encode()
    headers = {"Inference-Header-Content-Length": length or str(len(text))}
    response = client.post("/v2/models/identity/infer", content=text + raw, headers=headers)
    assert (response.status_code, error_of(response)) == (400, message)
    assert response.headers["content-type"] == (TEXT if length == "99999" else JSON)


def test_json_and_raw_data_without_a_header_length(client: httpx.Client) -> None:
    response = infer(client, json.dumps({"inputs": [BINARY]}).encode() + b"\0" + RAW[1:])
    assert (
        error_of(response) == "unexpected size for input 'INPUT0', expecting 16 additional bytes for model 'identity'"
    )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ('{"inputs":[', 500, "failed to parse the request JSON buffer: Invalid value. at 11"),
        ("[]", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ("{}", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ('{"inputs":{}}', 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ("", 400, "[request id: <id_unknown>] input byte size mismatch for input 'raw_input'"),
        ('{"id":5,"inputs":[]}', 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        (
            *('{"parameters":{"triton_x":1},"inputs":[]}', 400),
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            *('{"parameters":{"p":{"a":1}},"inputs":[]}', 400),
            "parameter 'p' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            *('{"parameters":{"priority":-1},"inputs":[]}', 500),
            "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ("[" * 101 + "]" * 101, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
        ("[" * 500000, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    ],
)
def test_documents_that_are_wrong(client: httpx.Client, body: str, status: int, message: str) -> None:
    response = infer(client, body.encode())
    assert (response.status_code, response.headers["content-type"]) == (status, JSON)
    assert error_of(response).startswith(message)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"shape": None}, 500, "Unable to parse 'shape': attempt to access non-existing object member 'shape'"),
        (
            {"datatype": None},
            500,
            "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'",
        ),
        ({"name": None}, 500, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
        (
            *({"shape": [-1, 4]}, 500),
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ({"data": [1, 2, 3]}, 400, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ({"data": [1, 2, 3, 4, 5]}, 400, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ({"data": ["a", "b", "c", "d"]}, 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
        ({"datatype": "FLOAT"}, 400, "invalid datatype for input INPUT0"),
        (
            *({"datatype": "FP16"}, 400),
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input INPUT0",
        ),
        (
            *({"data": None}, 400),
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. But no field is set",
        ),
        ({"name": "NOPE"}, 400, "unexpected inference input 'NOPE' for model 'identity'"),
        (
            *({"shape": [2**4, 2**60 + 2]}, 400),
            f"shape of input 'INPUT0' causes total element count to exceed maximum size of {2**63 - 1}",
        ),
        ({"shape": [2**2, 2**60 + 2]}, 400, "byte size overflow for input 'INPUT0'"),
    ],
)
def test_inputs_that_are_wrong(client: httpx.Client, change: dict[str, Any], status: int, message: str) -> None:
    changed = {key: value for key, value in {**INPUT, **change}.items() if value is not None}
    response = infer(client, {"inputs": [changed]})
    assert (response.status_code, error_of(response)) == (status, message)


@pytest.mark.parametrize(
    ("datatype", "data", "message"),
    [
        ("BYTES", [5], "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ("INT32", [1.5], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT32", [True], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("UINT8", [-1], "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("BOOL", [1], "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    ],
)
def test_elements_of_the_wrong_json_type(client: httpx.Client, datatype: str, data: Any, message: str) -> None:
    response = infer(client, {"inputs": [{"name": "S", "datatype": datatype, "shape": [1], "data": data}]}, "multi")
    assert (response.status_code, error_of(response)) == (500, message)


def test_errors_before_the_body_are_plain_text(client: httpx.Client) -> None:
    unknown = infer(client, {"inputs": []}, "nosuch")
    assert (unknown.status_code, unknown.headers["content-type"]) == (404, TEXT)
    decoupled = infer(client, b"whatever", "llm")
    assert (decoupled.status_code, decoupled.headers["content-type"]) == (501, TEXT)
    assert error_of(decoupled) == "HTTP end point doesn't support models with decoupled transaction policy"


def test_a_models_error(client: httpx.Client) -> None:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["fail"]}
    response = infer(client, {"inputs": [text]}, "textid")
    assert (response.status_code, response.headers["content-type"]) == (500, TEXT)
    assert response.text == '{"error":"model says no"}'


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compression_both_ways(client: httpx.Client, encoding: str, pack: Any) -> None:
    body = pack(json.dumps({"inputs": [INPUT]}).encode())
    response = infer(client, body, **{"Content-Encoding": encoding, "Accept-Encoding": f"br, {encoding};q=0.5"})
    assert (response.headers["content-encoding"], response.text) == (encoding, ANSWER)


def test_compression_that_is_wrong(client: httpx.Client) -> None:
    unknown = infer(client, b"x", **{"Content-Encoding": "br"})
    assert (unknown.status_code, unknown.headers["accept-encoding"]) == (501, "gzip, deflate")
    assert error_of(unknown) == "Unsupported compression type"
    assert infer(client, b"not gzip", **{"Content-Encoding": "gzip"}).status_code == 400
    assert infer(client, gzip.compress(b"{}" * 9)[:-9], **{"Content-Encoding": "gzip"}).status_code == 400
    bomb = infer(client, gzip.compress(bytes(LIMIT + 1)), **{"Content-Encoding": "gzip"})
    assert bomb.status_code == 400 and error_of(bomb) == (
        f"Decompressed data size exceeds the maximum allowed value of {LIMIT} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def test_bodies_beyond_the_limit(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield bytes(LIMIT // 20)

    announced = infer(client, b" " * (LIMIT + 1))
    assert announced.status_code == 400
    assert error_of(announced) == (
        f"request JSON size of {LIMIT + 1} bytes exceeds the maximum allowed input size of {LIMIT} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
    chunked = client.post("/v2/models/identity/infer", content=chunks())
    assert chunked.status_code == 400 and "exceeds the maximum allowed input size" in error_of(chunked)
    assert infer(client, {"inputs": [INPUT]}).text == ANSWER


def test_inputs_beyond_the_limit(client: httpx.Client) -> None:
    """The texts of qa/L0_http/http_input_size_limit_test.py. JSON may write a number in fewer bytes than it has."""
    too_large = (
        "that exceeds the maximum allowed value of 1048576 bytes. Use --http-max-input-size to increase the limit."
    )
    raw = infer(client, bytes(LIMIT + 4), **{"Inference-Header-Content-Length": "0"})
    assert (raw.status_code, error_of(raw)) == (400, f"Raw input has a byte_size ({LIMIT + 4} bytes) {too_large}")
    count = LIMIT // 4 + 1
    data = {"name": "INPUT0", "datatype": "FP32", "shape": [count], "data": [0] * count}
    body = json.dumps({"inputs": [data]}, separators=(",", ":")).encode()
    assert len(body) < LIMIT
    wide = infer(client, body)
    assert (wide.status_code, error_of(wide)) == (
        400,
        f"JSON input 'INPUT0' has a byte_size ({LIMIT + 4} bytes) {too_large}",
    )


def test_metrics(running: Running, client: httpx.Client) -> None:
    infer(client, {"inputs": [INPUT]})
    for path in ("/metrics", "/metrics/"):
        response = httpx.get(f"http://{running.metrics}{path}")
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        assert 'nv_inference_request_success{model="identity",version="1"}' in response.text
    empty = httpx.get(f"http://{running.metrics}/v2/health")
    assert (empty.status_code, empty.content) == (200, b"")
    refused = httpx.post(f"http://{running.metrics}/metrics")
    assert (refused.status_code, refused.headers["content-type"]) == (405, TEXT)


def test_a_body_with_two_lengths_is_refused(running: Running) -> None:
    """Triton reads it as chunked; docs/conformance.md says why it is refused here."""
    host, port = running.http.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
