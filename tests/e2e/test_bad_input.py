"""Bad input on each protocol: the right status, a message that names the field, and a server that keeps serving."""

from __future__ import annotations

import json
from typing import Any

import grpc
import openai
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.helpers.server_process import ServerProcess, post

GENERATE = "/v2/models/mock/generate"
STREAM = "/v2/models/mock/generate_stream"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOO_LONG = "x" * 600


HTTP_CASES: list[tuple[str, Any, int, str]] = [
    (GENERATE, b'{"text_input":', 500, "failed to parse the request JSON buffer"),
    (GENERATE, {}, 400, "text_input"),
    (GENERATE, {"text_input": ""}, 400, "prompt"),
    (GENERATE, {"text_input": 5}, 500, "non-string"),
    (GENERATE, {"text_input": ["a", "b"]}, 400, "text_input"),
    (GENERATE, {"text_input": TOO_LONG}, 400, "512"),
    (GENERATE, {"text_input": "x", "temperature": -1}, 400, "temperature"),
    (GENERATE, {"text_input": "x", "top_p": 1.5}, 400, "top_p"),
    (GENERATE, {"text_input": "x", "max_tokens": -1}, 400, "max_tokens"),
    (GENERATE, {"text_input": "x", "no_such_field": 1}, 400, "no_such_field"),
    (GENERATE, {"text_input": "x", "sampling_parameters": "{"}, 400, "sampling_parameters"),
    (GENERATE, {"text_input": "x", "messages": json.dumps(HELLO)}, 400, "messages"),
    (GENERATE, {"messages": "not json"}, 400, "messages"),
    (GENERATE, {"input_ids": [1, 99999]}, 400, "input_ids"),
    (STREAM, {"text_input": "x", "min_p": 2}, 400, "min_p"),
    (STREAM, {"text_input": "x", "stream": True, "exclude_input_in_output": False}, 400, "exclude_input_in_output"),
    ("/v2/models/nosuch/generate", {"text_input": "x"}, 404, "nosuch"),
    ("/v2/models/mock/versions/9/generate", {"text_input": "x"}, 404, "version 9"),
    ("/v2/models/mock/infer", {"inputs": []}, 501, "decoupled"),
    (CHAT, b"{", 400, "JSON"),
    (CHAT, {"model": "nosuch", "messages": HELLO}, 404, "nosuch"),
    (CHAT, {"messages": HELLO}, 400, "model"),
    (CHAT, {"model": "mock", "messages": []}, 400, "messages"),
    (CHAT, {"model": "mock", "messages": [{"role": "user", "content": TOO_LONG}]}, 400, "512"),
    (CHAT, {"model": "mock", "messages": HELLO, "temperature": 9}, 400, "temperature"),
    (CHAT, {"model": "mock", "messages": HELLO, "n": 129}, 400, "n"),
    (CHAT, {"model": "mock", "messages": HELLO, "no_such_field": 1}, 400, "no_such_field"),
    (CHAT, {"model": "mock", "messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"model": "mock", "messages": HELLO, "stream": True, "top_k": -7}, 400, "top_k"),
    (COMPLETIONS, {"model": "mock", "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"model": "mock", "prompt": [1, 99999]}, 400, "99999"),
    (COMPLETIONS, {"model": "mock", "prompt": "x", "suffix": "y"}, 400, "suffix"),
]


@pytest.mark.parametrize(("path", "body", "status", "named"), HTTP_CASES)
def test_http(server: ServerProcess, path: str, body: Any, status: int, named: str) -> None:
    got, text = post(server, path, body)
    assert (got, named in text) == (status, True), f"{got} {text}"
    event = json.loads(text.removeprefix("data: "))
    assert "error" in event
    assert post(server, GENERATE, {"text_input": "x", "max_tokens": 2})[0] == 200


def test_huge_http_body(server: ServerProcess) -> None:
    huge = b'{"text_input":"' + b"x" * (65 << 20) + b'"}'
    for path, status, limit_bytes in ((GENERATE, 400, 64 << 20), (CHAT, 413, 4 << 20)):
        try:
            got, text = post(server, path, huge)
        except (BrokenPipeError, ConnectionResetError):
            continue  # refused before the whole body was read: also an answer
        assert got == status and str(limit_bytes) in text
    assert post(server, GENERATE, {"text_input": "x", "max_tokens": 2})[0] == 200


def message(model: str = "mock", **inputs: tuple[str, list[int], bytes]) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, id="bad")
    for name, (datatype, shape, raw) in inputs.items():
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(raw)
    return request


def text(value: bytes) -> tuple[str, list[int], bytes]:
    return ("BYTES", [1], len(value).to_bytes(4, "little") + value)


GRPC_CASES = [
    (message(model="nosuch", text_input=text(b"x")), "nosuch"),
    (message(), "text_input"),
    (message(text_input=("INT32", [1], b"\0\0\0\0")), "data-type is 'INT32'"),
    (message(text_input=("BYTES", [2], b"\1\0\0\0x\1\0\0\0y")), "unexpected shape for input 'text_input'"),
    (message(text_input=("BYTES", [1], b"\x10\0\0\0x")), "text_input"),
    (message(text_input=text(b"")), "prompt"),
    (message(text_input=text(TOO_LONG.encode())), "512"),
    (message(text_input=text(b"x"), sampling_parameters=text(b'{"top_k": "many"}')), "top_k"),
    (message(text_input=text(b"x"), sampling_parameters=text(b'{"guided_json": "{"}')), "guided_json"),
]


@pytest.mark.parametrize(("request_", "named"), GRPC_CASES)
def test_grpc_stream(server: ServerProcess, request_: service_pb2.ModelInferRequest, named: str) -> None:
    good = message(text_input=text(b"x"))
    good.parameters["triton_enable_empty_final_response"].bool_param = True
    good.id = "good"
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([request_, good])))
    errors = [answer for answer in answers if answer.error_message]
    assert [error.infer_response.id for error in errors] == ["bad"]
    assert named in errors[0].error_message
    assert any(answer.infer_response.id == "good" and answer.infer_response.outputs for answer in answers)


def test_grpc_malformed_message(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready


def test_openai_error_carries_the_field(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="mock", messages=HELLO, top_p=3)  # type: ignore[arg-type]
        assert caught.value.param == "top_p"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nosuch")
