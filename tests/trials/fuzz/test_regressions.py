"""Inputs that once broke something, each with the answer that it gets now."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from llmbackend.frontends.grpc.server import create_grpc_server
from trials.fuzz.app_under_test import AppUnderTest
from trials.fuzz.exchange import HttpInput, complaint
from trials.fuzz.http_inputs import DECOUPLED, WHOLE

CHAT = "/v1/chat/completions"
INFER = f"/v2/models/{WHOLE}/infer"
GENERATE = f"/v2/models/{WHOLE}/generate"
LOAD = "/v2/repository/models/scratch/load"


def infer(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [1], "data": [1], **changes}]}


def chat(field: str, value: str) -> bytes:
    head = json.dumps({"model": DECOUPLED, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    return f'{head[:-1]}, "{field}": {value}}}'.encode()


def load(files: dict[str, bytes], config: str = '{"backend": "llm"}') -> dict[str, Any]:
    encoded = {f"file:{path}": base64.b64encode(content).decode() for path, content in files.items()}
    return {"parameters": {"config": config, **encoded}}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


CASES: dict[str, tuple[str, Any, int, str]] = {
    "a dimension beyond memory beside one of 0": (INFER, infer(shape=[0, 2**63], data=[]), 400, "invalid shape"),
    "the same for strings": (INFER, infer(datatype="BYTES", shape=[0, 2**63], data=[]), 400, "invalid shape"),
    "more dimensions than numpy has": (INFER, infer(shape=[1] * 100), 400, "invalid shape"),
    "an integer of 5000 digits": (GENERATE, b'{"text_input": "x", "seed": %b}' % (b"9" * 5000), 500, "Number too big"),
    "an integer beyond the doubles": (INFER, b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": '
                                      b"[%b]}]}" % (b"9" * 400), 500, "non-number as double"),
    "a top_k that no message can hold": (
        GENERATE, {"text_input": "x", "sampling_parameters": json.dumps({"top_k": 10**30})}, 200, "",
    ),
    "more tokens than a model has room for": (
        GENERATE,
        {"text_input": "x", "max_tokens": 2**32, "ignore_eos": True, "return_finish_reason": True}, 200, "length",
    ),
    "brackets in a parameter's text": (GENERATE, {"text_input": "x", "logit_bias": "[" * 100_000}, 400, "logit_bias"),
    "a value too deep to be shown": (CHAT, chat("temperature", nested(1000)), 400, "depth"),
    "a value too deep to be handed on": (CHAT, chat("chat_template_kwargs", f'{{"a": {nested(260)}}}'), 400, "depth"),
    "a value that is long to show": (CHAT, chat("temperature", "[" + "1," * 9999 + "1]"), 400, "temperature"),
    "base64 that is not ASCII": (LOAD, {"parameters": {"config": "{}", "file:1/model.json": "é"}}, 400, "not base64"),
    "brackets in model.json": (LOAD, load({"1/model.json": b"[" * 100_000}), 400, "is not JSON"),
    "a model's path too long for a file system": (
        LOAD, load({"1/model.json": b'{"model": "%b"}' % (b"x" * 5000)}), 400, "File name too long",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_over_http(name: str, app: AppUnderTest) -> None:
    path, body, status, text = CASES[name]
    request = HttpInput(path, body if isinstance(body, bytes) else json.dumps(body).encode())
    answer, tracebacks = app.send(request)
    assert (answer.status, tracebacks) == (status, [])
    assert complaint(request, answer) == ""
    assert text in answer.body.decode() and len(answer.body) < 2000


def test_a_timeout_of_centuries_leaves_deadlines_working(app: AppUnderTest) -> None:
    """Once it ended the thread that watches deadlines, so that later ones never came."""
    for timeout_us in (2**64 - 1, 1):
        body = infer() | {"parameters": {"timeout": timeout_us, "max_tokens": 60, "ignore_eos": True}}
        answer, tracebacks = app.send(HttpInput(INFER, json.dumps(body).encode()))
        assert not tracebacks
    assert (answer.status, b"timeout" in answer.body) == (503, True), answer.body


def test_a_malformed_message_among_running_requests_ends_the_stream_with_a_status(
    app: AppUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the status was sent while a response was being written, which gRPC refuses with a traceback."""

    async def run() -> list[tuple[grpc.StatusCode, str | None]]:
        server, port = await create_grpc_server(app.context, address="127.0.0.1:0")
        await server.start()
        ends: list[tuple[grpc.StatusCode, str | None]] = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: Any = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            for _ in range(30):
                call = method(iter([good.SerializeToString()] * 8 + [b"\xff\xff"]))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                ends.append((await call.code(), await call.details()))
        await server.stop(1)
        return ends

    good = pb.ModelInferRequest(model_name=DECOUPLED, id="1")
    for name, value in (("text_input", b"x"), ("sampling_parameters", b'{"max_tokens": 20, "ignore_eos": true}')):
        good.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value)
    good.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    assert set(app.run(run())) == {(grpc.StatusCode.INTERNAL, "Unable to parse request")}
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("method", ["TRACE", "QUERY", "PROPFIND"])
def test_a_method_that_few_know_is_refused_in_openais_shape(method: str, app: AppUnderTest) -> None:
    request = HttpInput("/v1/models", b"", method=method)
    answer, _ = app.send(request)
    assert (answer.status, answer.headers["allow"], complaint(request, answer)) == (405, "GET", "")
