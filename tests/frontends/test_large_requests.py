"""Large requests: answered as small ones are, and nothing of their work is done on the event loop."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.messages import InferenceRequest, ResponseCallback
from llmbackend.core.tensors import RawTensor
from tests.helpers.kserve_runner import Running
from tests.helpers.waiting import eventually_async

MANY = 10_000


@contextmanager
def threads_that_submit(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    names: list[str] = []
    infer_async = running.host.infer_async

    def noted(request: InferenceRequest, callback: ResponseCallback) -> Any:
        names.append(threading.current_thread().name)
        return infer_async(request, callback)

    monkeypatch.setattr(running.host, "infer_async", noted)
    yield names
    monkeypatch.undo()


def multi(client_module: Any, count: int) -> list[Any]:
    strings = client_module.InferInput("S", [count], "BYTES")
    strings.set_data_from_numpy(np.array([b"%d" % n for n in range(count)], dtype=np.object_))
    numbers = client_module.InferInput("I", [2, 1], "INT32")
    numbers.set_data_from_numpy(np.zeros((2, 1), np.int32))
    return [strings, numbers]


@pytest.mark.parametrize("count", [10, MANY])
def test_many_strings_are_decoded_off_the_event_loop(
    running: Running, client: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = triton_http if isinstance(client, triton_http.InferenceServerClient) else triton_grpc
    with threads_that_submit(running, monkeypatch) as names:
        echoed = client.infer("multi", multi(module, count)).as_numpy("S")
    assert echoed.tolist() == [b"%d" % n for n in range(count)]
    assert [name == "frontends" for name in names] == [count == 10]


def test_a_client_that_leaves_while_its_strings_are_decoded_leaves_nothing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    infer_async = running.host.infer_async

    def held(request: InferenceRequest, callback: ResponseCallback) -> Any:
        begun.set()
        assert go_on.wait(20)
        return infer_async(request, callback)

    monkeypatch.setattr(running.host, "infer_async", held)
    raw = b"".join(b"\1\0\0\0x" for _ in range(MANY))
    tensors = RawTensor("S", "BYTES", (MANY,), raw), RawTensor("I", "INT32", (2, 1), bytes(8))

    async def leave() -> None:
        sending = asyncio.ensure_future(running.gate.send(InferenceRequest("multi", inputs=tensors)))
        await asyncio.to_thread(begun.wait, 20)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert running.gate.open_inferences == 1
        go_on.set()
        await eventually_async(lambda: not running.gate.open_inferences)

    running.call(leave())


def test_a_refused_request_gives_its_place_back(running: Running) -> None:
    tensors = (RawTensor("S", "BYTES", (MANY,), bytes(8 * MANY)),)
    with pytest.raises(Exception, match="but got 1 inputs"):
        running.call(running.gate.send(InferenceRequest("multi", inputs=tensors)))
    assert running.gate.open_inferences == 0


LARGE = 100_000


def test_large_json_is_parsed_and_printed_in_a_process(running: Running) -> None:
    """As numbers, as strings, refused, and with raw bytes behind it."""
    words = [f"é{n}" for n in range(LARGE)]
    with httpx.Client(base_url=f"http://{running.http}", timeout=60) as client:
        data: Any = {"name": "S", "datatype": "BYTES", "shape": [LARGE], "data": words}
        numbers = {"name": "I", "datatype": "INT32", "shape": [2, LARGE], "data": list(range(2 * LARGE))}
        answer = client.post("/v2/models/multi/infer", json={"inputs": [data, numbers]}).json()
        outputs = {output["name"]: output["data"] for output in answer["outputs"]}
        assert outputs["S"] == words and outputs["I"] == list(range(2 * LARGE))

        wrong = client.post("/v2/models/multi/infer", json={"inputs": [data, numbers | {"shape": [2, 1]}]})
        assert (wrong.status_code, wrong.json()["error"]) == (
            400,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        )

        raw = np.arange(2, dtype=np.int32).tobytes()
        behind = {"name": "I", "datatype": "INT32", "shape": [2, 1], "parameters": {"binary_data_size": len(raw)}}
        json_part = json.dumps({"inputs": [data, behind], "outputs": [{"name": "I"}]}).encode()
        headers = {"inference-header-content-length": str(len(json_part))}
        answer = client.post("/v2/models/multi/infer", content=json_part + raw, headers=headers).json()
        assert answer["outputs"][0]["data"] == [0, 1]


def test_many_members_inputs_and_parameters_are_refused_by_name(running: Running) -> None:
    many = {f"k{n}": 1 for n in range(5000)}
    with httpx.Client(base_url=f"http://{running.http}", timeout=60) as client:
        for path, body, text in [
            ("llm/generate", {"text_input": "n=1"} | many, "has 5001 members, at most 4096 are accepted"),
            ("llm/generate", {"text_input": "n=1", "parameters": many}, "has 5000 parameters, at most 4096"),
            ("multi/infer", {"inputs": [], "parameters": many}, "has 5000 parameters, at most 4096"),
            ("multi/infer", {"inputs": [{}] * 5000}, "has 5000 inputs, at most 4096"),
            ("multi/infer", {"inputs": [], "outputs": [{}] * 5000}, "has 5000 requested outputs, at most 4096"),
            ("llm/generate", {"text_input": "n=1", "id": "i" * 5000}, "id has 5000 characters, at most 4096"),
        ]:
            refused = client.post(f"/v2/models/{path}", json=body)
            assert refused.status_code == 400 and text in refused.json()["error"], refused.text


def typed(count: int, **fields: Any) -> pb.ModelInferRequest:
    """Of `multi`: `count` strings and as many pairs of numbers as typed contents, which the model gives back."""
    request = pb.ModelInferRequest(model_name="multi", **fields)
    request.inputs.add(name="S", datatype="BYTES", shape=[count])
    request.inputs[0].contents.bytes_contents.extend([b"%d" % n for n in range(count)])
    request.inputs.add(name="I", datatype="INT32", shape=[2, count])
    request.inputs[1].contents.int_contents.extend(range(-count, count))
    return request


@pytest.mark.parametrize("count", [3, LARGE])
def test_typed_contents_of_any_size_are_answered_alike(running: Running, count: int) -> None:
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        stub = client._client_stub
        answer = stub.ModelInfer(typed(count, id="t"), timeout=60)
        assert answer.id == "t" and answer.model_name == "multi"
        numbers = dict(zip([output.name for output in answer.outputs], answer.raw_output_contents, strict=True))
        assert np.frombuffer(numbers["I"], np.int32).tolist() == list(range(-count, count))
        assert numbers["S"] == b"".join(struct.pack("<I", len(text := b"%d" % n)) + text for n in range(count))

        wrong = typed(count)
        wrong.inputs[0].datatype = "INT32"
        with pytest.raises(grpc.RpcError, match="unexpected explicit tensor data for input tensor 'S'"):
            stub.ModelInfer(wrong, timeout=60)
        both = typed(count)
        both.raw_input_contents.append(b"")
        with pytest.raises(grpc.RpcError, match="contents field must not be specified when using raw_input_contents"):
            stub.ModelInfer(both, timeout=60)


def test_typed_contents_may_fill_the_whole_message(running: Running) -> None:
    """Triton has no bound of its own for them: only the message's."""
    numbers = range(-1_500_000, 1_500_000)
    request = pb.ModelInferRequest(model_name="multi")
    request.inputs.add(name="S", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    request.inputs.add(name="I", datatype="INT32", shape=[2, len(numbers) // 2]).contents.int_contents.extend(numbers)
    assert request.ByteSize() > 16 << 20
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        answer = client._client_stub.ModelInfer(request, timeout=60)
    echoed = dict(zip([output.name for output in answer.outputs], answer.raw_output_contents, strict=True))
    assert echoed["I"] == np.array(numbers, np.int32).tobytes()


def test_large_raw_tensors_are_found_without_parsing(running: Running) -> None:
    count = 1 << 18
    request = pb.ModelInferRequest(model_name="multi", id="raw")
    request.inputs.add(name="S", datatype="BYTES", shape=[1])
    request.inputs.add(name="I", datatype="INT32", shape=[2, count])
    data = np.arange(2 * count, dtype=np.int32).tobytes()
    request.raw_input_contents.extend([struct.pack("<I", 3) + b"abc", data])
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        answer = client._client_stub.ModelInfer(request, timeout=60)
        echoed = dict(zip([output.name for output in answer.outputs], answer.raw_output_contents, strict=True))
        assert echoed["I"] == data and echoed["S"] == struct.pack("<I", 3) + b"abc" and answer.id == "raw"


def test_large_grpc_messages_are_refused_by_what_they_hold(running: Running) -> None:
    def parts(size: int, **fields: Any) -> bytes:
        part = pb.ModelInferRequest(**fields).SerializeToString()
        return b"".join([part] * (size // len(part)))

    head = typed(3).SerializeToString()
    many = pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor()] * 10)
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        infer = client._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        stream = client._channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        for message, code, text in [
            (head + parts(1 << 20, inputs=many.inputs), grpc.StatusCode.INVALID_ARGUMENT, "more than 20000 fields"),
            (head + b"\xa2\x06" + parts(1 << 20, id="x")[:3], grpc.StatusCode.INTERNAL, "Unable to parse request"),
            (b"\xff" * (1 << 20), grpc.StatusCode.INTERNAL, "Unable to parse request"),
            (
                typed(3, id="i" * (1 << 20)).SerializeToString(),
                grpc.StatusCode.INVALID_ARGUMENT,
                "the id, names, shapes",
            ),
            (
                typed(3, model_version="1" * (1 << 20)).SerializeToString(),
                grpc.StatusCode.INVALID_ARGUMENT,
                "id, names, shapes and parameters of the request take",
            ),
            (b"\0" * (17 << 20), grpc.StatusCode.INVALID_ARGUMENT, "more than 20000 fields"),
            (
                typed(3, id="i" * (17 << 20)).SerializeToString(),
                grpc.StatusCode.INVALID_ARGUMENT,
                "the id, names, shape",
            ),
        ]:
            with pytest.raises(grpc.RpcError, match=text) as caught:
                infer(message, timeout=60)
            assert caught.value.code() is code
            if code is grpc.StatusCode.INVALID_ARGUMENT:  # in band, and the stream goes on
                sent = iter([message, typed(3).SerializeToString()])
                answers = [pb.ModelStreamInferResponse.FromString(answer) for answer in stream(sent, timeout=60)]
                assert re.search(text, answers[0].error_message) and not answers[1].error_message
            else:
                with pytest.raises(grpc.RpcError, match=text):
                    list(stream(iter([message]), timeout=60))


@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
def test_large_binary_tensors_go_in_and_out_unchanged(running: Running, encoding: str) -> None:
    """Behind a JSON part of odd length, so that they do not lie on a multiple of their size."""
    numbers = np.arange(2 * LARGE, dtype=np.int32).tobytes()
    strings = b"".join(struct.pack("<I", len(text := b"%d" % n)) + text for n in range(MANY))
    inputs = [
        {"name": "S", "datatype": "BYTES", "shape": [MANY], "parameters": {"binary_data_size": len(strings)}},
        {"name": "I", "datatype": "INT32", "shape": [2, LARGE], "parameters": {"binary_data_size": len(numbers)}},
    ]
    json_part = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    json_part += b" " * (1 - len(json_part) % 2)
    headers = {"inference-header-content-length": str(len(json_part)), "accept-encoding": encoding}
    with httpx.Client(base_url=f"http://{running.http}", timeout=60) as client:
        answer = client.post("/v2/models/multi/infer", content=json_part + strings + numbers, headers=headers)
    assert answer.headers.get("content-encoding", "identity") == encoding
    head_bytes = int(answer.headers["inference-header-content-length"])
    offset = head_bytes
    found = {}
    for output in json.loads(answer.content[:head_bytes])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = answer.content[offset : offset + size]
        offset += size
    assert found["I"] == numbers and found["S"] == strings and offset == len(answer.content)


def test_bodies_that_control_the_server_are_small(running: Running) -> None:
    many = json.dumps({f"k{n}": "v" for n in range(200_000)})
    text = "the request has more than 1048576 bytes, the maximum for this endpoint"
    with httpx.Client(base_url=f"http://{running.http}", timeout=60) as client:
        for path in (
            "trace/setting",
            "logging",
            "repository/index",
            "repository/models/spare/unload",
            "models/llm/stop",
            "systemsharedmemory/region/r/register",
        ):
            refused = client.post(f"/v2/{path}", content=many)
            assert (refused.status_code, refused.json()) == (400, {"error": text}), path
    settings = pb.LogSettingsRequest(settings={"k": pb.LogSettingsRequest.SettingValue(string_param="v" * (2 << 20))})
    with triton_grpc.InferenceServerClient(running.grpc) as client, pytest.raises(grpc.RpcError) as caught:
        client._client_stub.LogSettings(settings, timeout=60)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_files_of_a_load_may_be_large(running: Running, size: int) -> None:
    config = json.dumps({"backend": "no-such-backend"})
    content = base64.b64encode(bytes(size)).decode()
    with httpx.Client(base_url=f"http://{running.http}", timeout=60) as client:
        body = {"parameters": {"config": config, "file:1/model.bin": content}}
        refused = client.post("/v2/repository/models/spare/load", json=body)
        assert refused.status_code >= 400 and "no-such-backend" in refused.json()["error"]
        body["parameters"]["file:1/model.bin"] = content + "!"
        refused = client.post("/v2/repository/models/spare/load", json=body)
        assert refused.status_code == 400 and "is not base64" in refused.json()["error"]
