"""Laws that users rely on, over real sockets: same request, same tokens; stream = non-stream; cancel is real."""

from __future__ import annotations

import json
import queue
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.helpers.server_process import ServerProcess, post

Tokens = tuple[int, ...]
ALONE = 3
"""Every third job is run alone, too: greedy and seeded ones take turns."""


def tensor(name: str, datatype: str, array: np.ndarray[Any, Any]) -> grpc_client.InferInput:
    made = grpc_client.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def inputs(prompt: str, sampling: dict[str, Any]) -> list[grpc_client.InferInput]:
    return [
        tensor("text_input", "BYTES", np.array([prompt.encode()], dtype=object)),
        tensor("sampling_parameters", "BYTES", np.array([json.dumps(sampling).encode()], dtype=object)),
        tensor("stream", "BOOL", np.array([True])),
        tensor("return_output_ids", "BOOL", np.array([True])),
    ]


def run_streams(address: str, model: str, jobs: list[tuple[str, dict[str, Any]]]) -> list[Tokens]:
    """Sends all jobs at once on one gRPC stream; the output token ids of each, in order."""
    client = grpc_client.InferenceServerClient(address)
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    for index, (prompt, sampling) in enumerate(jobs):
        client.async_stream_infer(
            model, inputs(prompt, sampling), request_id=str(index), enable_empty_final_response=True
        )
    tokens: list[list[int]] = [[] for _ in jobs]
    open_jobs = len(jobs)
    while open_jobs:
        result, error = results.get(timeout=90)
        assert error is None, error
        response = result.get_response()
        ids = result.as_numpy("output_ids")
        if ids is not None:
            tokens[int(response.id)].extend(int(token) for token in ids)
        open_jobs -= response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    client.close()
    return [tuple(ids) for ids in tokens]


def mixed_jobs(seed: int, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Greedy and seeded jobs of mixed prompt and output lengths."""
    rng = random.Random(seed)
    jobs = []
    for index in range(count):
        prompt = " ".join(
            rng.choice(["count", "from", "three", "Triton", "serves", "é", "名"]) for _ in range(rng.randint(1, 24))
        )
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "ignore_eos": True}
        sampling |= {"temperature": 0} if index % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": index}
        jobs.append((prompt, sampling))
    return jobs


@pytest.mark.parametrize("model", ["mock"])
def test_64_concurrent_streams_give_the_tokens_of_one_at_a_time(server: ServerProcess, model: str) -> None:
    jobs = mixed_jobs(seed=1, count=64)
    together = run_streams(server.grpc, model, jobs)
    alone = [run_streams(server.grpc, model, [job])[0] for job in jobs[::ALONE]]
    assert together[::ALONE] == alone
    assert [len(ids) for ids in together] == [sampling["max_tokens"] for _, sampling in jobs]
    server.wait_until_idle(model)


def test_64_concurrent_streams_of_the_demo_model_give_the_tokens_of_one_at_a_time(demo_server: ServerProcess) -> None:
    jobs = mixed_jobs(seed=2, count=64)
    together = run_streams(demo_server.grpc, "demo", jobs)
    alone = [run_streams(demo_server.grpc, "demo", [job])[0] for job in jobs[::ALONE]]
    assert together[::ALONE] == alone
    demo_server.wait_until_idle("demo")


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me something, 名前 😀"}],
    "seed": 7,
    "temperature": 0.8,
    "max_tokens": 60,
    "stop": ["zz", "q."],
}


def openai_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)


def test_stream_equals_whole_on_openai(server: ServerProcess) -> None:
    """A salt each, since the usage says what was cached, and the second finds what the first one left."""
    ask: dict[str, Any] = {"model": "mock", **CHAT}
    with openai_of(server) as client:
        whole = client.chat.completions.create(**ask, extra_body={"cache_salt": "whole"})
        stream: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**ask, **stream, extra_body={"cache_salt": "stream"}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def generate_bodies(stream: bool) -> dict[str, Any]:
    messages = json.dumps(CHAT["messages"])
    sampling = json.dumps({key: value for key, value in CHAT.items() if key != "messages"})
    return {"messages": messages, "sampling_parameters": sampling, "stream": stream, "return_finish_reason": True}


def test_stream_equals_whole_on_generate_and_openai(server: ServerProcess) -> None:
    status, text = post(server, "/v2/models/mock/generate", generate_bodies(stream=False))
    assert status == 200, text
    whole = json.loads(text)
    status, text = post(server, "/v2/models/mock/generate_stream", generate_bodies(stream=True))
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert events[-1]["finish_reason"] == whole["finish_reason"]
    with openai_of(server) as client:
        chat = client.chat.completions.create(model="mock", **CHAT)
    assert chat.choices[0].message.content == whole["text_output"]


LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


def raw_http(server: ServerProcess, path: str, body: dict[str, Any]) -> socket.socket:
    host, _, port = server.http.partition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


HTTP_LONG: dict[str, dict[str, Any]] = {
    "/v2/models/slow/generate_stream": {"text_input": "x", "stream": True, "parameters": LONG},
    "/v2/models/slow/generate": {"text_input": "x", "parameters": LONG},
    "/v1/chat/completions": {"model": "slow", "messages": [{"role": "user", "content": "x"}], "stream": True} | LONG,
    "/v1/completions": {"model": "slow", "prompt": "x"} | LONG,
}


def wait_until_running(server: ServerProcess, model: str) -> None:
    for _ in range(400):
        if server.metric("vllm:num_requests_running", model) > 0:
            return
        threading.Event().wait(0.02)
    raise AssertionError("the request never ran")


@pytest.mark.parametrize("path", HTTP_LONG)
def test_http_disconnect_frees_the_kv(server: ServerProcess, path: str) -> None:
    before = server.metric("vllm:generation_tokens_total", "slow")
    connection = raw_http(server, path, HTTP_LONG[path])
    wait_until_running(server, "slow")
    connection.close()
    server.wait_until_idle("slow", timeout_s=4)
    assert server.metric("vllm:generation_tokens_total", "slow") - before < LONG["max_tokens"]


def infer_request(model: str, sampling: dict[str, Any]) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, id="c")
    for name, value in (("text_input", b"x"), ("sampling_parameters", json.dumps(sampling).encode())):
        made = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        made.contents.bytes_contents.append(value)
    made = request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    made.contents.bool_contents.append(True)
    return request


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_grpc_cancel_frees_the_kv(server: ServerProcess, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    call = stub.ModelStreamInfer(iter([infer_request("slow", LONG), infer_request("slow", LONG)]))
    next(call)
    call.cancel()
    server.wait_until_idle("slow", timeout_s=4)


def test_grpc_deadline_frees_the_kv(server: ServerProcess, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.ModelStreamInfer(iter([infer_request("slow", LONG)]), timeout=0.7))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.wait_until_idle("slow", timeout_s=4)
