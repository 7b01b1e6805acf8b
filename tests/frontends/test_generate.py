"""The generate extension, seen with raw requests. Expectations are the recorded transcripts."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import pytest

from tests.helpers.kserve_runner import Running
from tests.helpers.kserve_scripted import RECORD

JSON, SSE = "application/json", "text/event-stream; charset=utf-8"
NOT_ONE = (
    '{"error":"generate expects model to produce exactly 1 response, '
    'use generate stream for model that generates various number of responses"}'
)


def post(http: httpx.Client, model: str, body: Any, how: str = "generate") -> httpx.Response:
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return http.post(f"/v2/models/{model}/{how}", content=content)


def token(index: int) -> str:
    return f'data: {{"model_name":"llm","model_version":"1","text_output":" tok{index}"}}\n\n'


@pytest.mark.parametrize(
    ("model", "body", "answer"),
    [
        ("llm", {"text_input": "n=1"}, '{"model_name":"llm","model_version":"1","text_output":" tok0"}'),
        ("llm", {"text_input": "n=1 lastfinal"}, '{"model_name":"llm","model_version":"1","text_output":" tok0"}'),
        ("llm/versions/1", {"text_input": "n=1"}, '{"model_name":"llm","model_version":"1","text_output":" tok0"}'),
        ("textid", {"text_input": "hello"}, '{"model_name":"textid","model_version":"1","n":5,"text_output":"hello"}'),
        (
            "textid",
            {"text_input": ["hello"]},
            '{"model_name":"textid","model_version":"1","n":5,"text_output":"hello"}',
        ),
        (
            *("identity", {"INPUT0": [1, 2, 3, 4]}),
            '{"OUTPUT0":[1.0,2.0,3.0,4.0],"model_name":"identity","model_version":"1"}',
        ),
        ("llm", {"text_input": "n=0"}, NOT_ONE),
        ("llm", {"text_input": "n=2"}, NOT_ONE),
        ("llm", {"text_input": "n=3 err=1"}, NOT_ONE),
    ],
)
def test_generate(http: httpx.Client, model: str, body: Any, answer: str) -> None:
    response = post(http, model, body)
    assert (response.status_code, response.text) == (200, answer)
    assert response.headers["content-type"] == JSON and response.headers["transfer-encoding"] == "chunked"


CODES = ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"]


@pytest.mark.parametrize("code", CODES)
def test_an_error_first_is_a_400_for_every_code(http: httpx.Client, code: str) -> None:
    response = post(http, "llm", {"text_input": f"n=1 err=0 code={code}"})
    assert (response.status_code, response.text, response.headers["content-type"]) == (
        *(400, '{"error":"boom at 0"}'),
        JSON,
    )


@pytest.mark.parametrize("how", ["generate", "generate_stream"])
def test_a_refusal_first_is_a_503_that_says_when_to_try_again(http: httpx.Client, how: str) -> None:
    response = post(http, "llm", {"text_input": "n=1 err=0 code=UNAVAILABLE"}, how)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert '{"error":"boom at 0"}' in response.text


@pytest.mark.parametrize("how", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            "{}",
            400,
            "[request id: <id_unknown>] expected number of inputs between 1 and 3 but got 0 inputs for model 'llm'. "
            "Got input(s) [], but missing required input(s) ['text_input']. Please provide all required input(s).",
        ),
        ("", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("notjson", 500, "failed to parse the request JSON buffer: Invalid value. at 1"),
        ("[1]", 500, "attempt to get members for non-object"),
        (
            *('{"text_input":5}', 500),
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        ),
        ('{"text_input":null}', 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (
            *('{"text_input":{"a":1}}', 500),
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        ),
        ('{"text_input":[]}', 400, "The schema can not convert input 'text_input' to tensor with proper shape"),
        ('{"text_input":["a","b"]}', 400, "The schema can not convert input 'text_input' to tensor with proper shape"),
        (
            *('{"text_input":"n=1","stream":"yes"}', 500),
            "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
        ),
        (
            *('{"text_input":"n=1","max_tokens":1.5}', 500),
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        (
            *('{"text_input":"n=1","parameters":5}', 500),
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        (
            *('{"text_input":"n=1","parameters":{"a":[1]}}', 400),
            "Converting keyword: 'parameters': parameter 'a' has invalid type. "
            "It should be either 'int', 'bool', or 'string'.",
        ),
        (
            *('{"text_input":"x","extra":null}', 400),
            "parameter 'extra' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            *('{"text_input":"x","triton_lora_change":"{}"}', 400),
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            *('{"text_input":"x","parameters":{"triton_x":1}}', 400),
            "Converting keyword: 'parameters': parameter keys starting with 'triton_' are reserved",
        ),
        ('{"text_input":"x","id":7}', 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ('{"text_input":"a","text_input":"b"}', 400, "[request id: <id_unknown>] input 'text_input' already exists"),
        (
            '{"stream":1,"text_input":"a","text_input":"b","stream":2,"text_input":"c"}',
            *(400, "[request id: <id_unknown>] input 'text_input' already exists"),
        ),
        ('{"text_input":"a","parameters":{"text_input":"b"}}', 400, "Converting keyword: 'parameters': [request id"),
        ('{"a":' * 101 + "1" + "}" * 101, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    ],
)
def test_requests_that_are_wrong(http: httpx.Client, how: str, body: str, status: int, message: str) -> None:
    response = post(http, "llm", body, how)
    assert (response.status_code, response.headers["content-type"]) == (status, JSON)
    assert response.json()["error"].startswith(message)


def test_unknown_models_and_encodings(http: httpx.Client) -> None:
    assert post(http, "nosuch", {"text_input": "x"}).status_code == 404
    missing = post(http, "llm/versions/3", {"text_input": "x"}, "generate_stream")
    assert missing.json() == {"error": "Request for unknown model: 'llm' version 3 is not found"}
    packed = http.post("/v2/models/llm/generate", content=b"x", headers={"Content-Encoding": "gzip"})
    assert (packed.status_code, packed.json()["error"]) == (
        *(400, "Unsupported content-encoding, only 'identity' is supported."),
    )
    nested = post(http, "identity", {"INPUT0": [[1, 2, 3, 4]]})
    assert nested.json() == {"error": "The schema can not convert input 'INPUT0' to tensor with proper shape"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"id": "my-id"}, {"params": {"id": "my-id"}, "id": "my-id", "stream": None, "max_tokens": None}),
        (
            {"parameters": {"temperature": 0.5, "max_tokens": 7, "flag": True, "s": "x"}},
            {"params": {"temperature": 0.5, "flag": True, "s": "x"}, "id": "", "stream": None, "max_tokens": [7]},
        ),
        (
            {"stream": True, "max_tokens": 16, "temperature": 0},
            {"params": {"temperature": 0}, "id": "", "stream": [True], "max_tokens": [16]},
        ),
        ({"max_tokens": 99999999999}, {"params": {}, "id": "", "stream": None, "max_tokens": [1215752191]}),
    ],
)
def test_keys_become_tensors_parameters_and_the_id(http: httpx.Client, more: Any, expected: Any) -> None:
    answer = post(http, "llm", {"text_input": "params"} | more).json()
    assert json.loads(answer["text_output"]) == expected
    assert answer.get("id", "") == expected["id"]


@pytest.mark.parametrize(
    ("model", "text", "status", "events"),
    [
        ("llm", "n=3", 200, token(0) + token(1) + token(2)),
        ("llm", "n=2 lastfinal", 200, token(0) + token(1)),
        ("llm", "n=0", 200, ""),
        ("llm", "preerr", 400, 'data: {"error":"early failure"}\n\n'),
        ("llm", "n=3 err=1", 200, token(0) + 'data: {"error":"boom at 1"}\n\n'),
        ("llm", "n=3 err=1 cont", 200, token(0) + 'data: {"error":"boom at 1"}\n\n' + token(2)),
        ("textid", "fail", 400, 'data: {"error":"model says no"}\n\n'),
        (
            *("textid", 'a\nb "q" é 😀 \t</s>', 200),
            'data: {"model_name":"textid","model_version":"1","n":21,"text_output":"a\\nb \\"q\\" é 😀 \\t</s>"}\n\n',
        ),
    ],
)
def test_generate_stream(http: httpx.Client, model: str, text: str, status: int, events: str) -> None:
    response = post(http, model, {"text_input": text}, "generate_stream")
    assert (response.status_code, response.headers["content-type"]) == (status, SSE)
    assert response.headers["transfer-encoding"] == "chunked"
    assert response.text == events


def test_text_that_is_not_utf8_is_an_error_event(running: Running, http: httpx.Client) -> None:
    raw = b"\x02\x00\x00\x00\xff\xfe"
    header = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}]}
    header["inputs"][0]["parameters"] = {"binary_data_size": len(raw)}  # type: ignore[assignment]
    text = json.dumps(header).encode()
    response = http.post(
        "/v2/models/textid/infer", content=text + raw, headers={"Inference-Header-Content-Length": str(len(text))}
    )
    assert response.status_code == 500 and "'text_output' is not valid UTF-8" in response.json()["error"]


def test_events_arrive_as_they_are_made(http: httpx.Client) -> None:
    body = {"text_input": "n=3 sleep=100"}
    with http.stream("POST", "/v2/models/llm/generate_stream", json=body) as response:
        chunks = [chunk for chunk in response.iter_raw() if chunk]
    assert len(chunks) == 3


def send_and_leave(running: Running, path: str, body: str, request_id: str) -> None:
    """Sends a request on a bare socket and closes it as soon as the host has accepted the request."""
    host, port = running.http.split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body.encode())
        assert RECORD.began[request_id].wait(10)


@pytest.mark.parametrize("how", ["generate", "generate_stream"])
def test_a_client_that_leaves_cancels(running: Running, how: str) -> None:
    request_id = f"gone-{how}"
    body = json.dumps({"id": request_id, "text_input": "n=1000 sleep=20"})
    send_and_leave(running, f"/v2/models/llm/{how}", body, request_id)
    assert RECORD.cancelled[request_id].wait(10)


def test_a_client_that_leaves_before_the_first_response_cancels(running: Running) -> None:
    body = json.dumps({"id": "early", "text_input": "n=1 sleep=20000"})
    send_and_leave(running, "/v2/models/llm/generate_stream", body, "early")
    assert RECORD.cancelled["early"].wait(10)


def test_a_client_that_leaves_infer_cancels(running: Running) -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["slow"]}
    body = json.dumps({"id": "infer-gone", "inputs": [tensor]})
    send_and_leave(running, "/v2/models/textid/infer", body, "infer-gone")
    assert RECORD.cancelled["infer-gone"].wait(10)


def test_a_request_that_ends_is_not_cancelled(running: Running, http: httpx.Client) -> None:
    post(http, "llm", {"id": "whole", "text_input": "n=2"}, "generate_stream")
    assert not RECORD.cancelled["whole"].is_set()


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_a_large_body_is_parsed_off_the_event_loop_and_answered_alike(
    running: Running, http: httpx.Client, size: int
) -> None:
    word = "x" * size
    assert post(http, "textid", {"text_input": word}).json()["n"] == size
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [word]}
    answer = http.post("/v2/models/textid/infer", json={"inputs": [tensor]}).json()
    assert {output["name"]: output["data"] for output in answer["outputs"]} == {"n": [size], "text_output": [word]}
    wrong = post(http, "textid", json.dumps({"text_input": word})[:-1])
    assert wrong.status_code == 500 and "Missing a comma or" in wrong.json()["error"]
    on_loop = running.call(running.gate.decode_in_thread(size, threading.current_thread)).name == "frontends"
    assert on_loop == (size == 1000)
