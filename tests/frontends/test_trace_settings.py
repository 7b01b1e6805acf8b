"""The trace extension over real HTTP and gRPC: settings of the server and of models, and traces of real requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.tracing.trace import TraceLevel, TraceSettings
from llmbackend.frontends.inference_gate import MANY_STRINGS
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL as MODEL_NAME
from tests.helpers.mock_llm_host import mock_llm_host
from tests.helpers.waiting import eventually

SERVER, MODEL = "/v2/trace/setting", "/v2/models/identity/trace/setting"
DEFAULTS = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
INFER = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
HTTP_TIMES = ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"]
GRPC_TIMES = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"]
MODEL_TIMES = [
    *("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
    *("INFER_RESPONSE_COMPLETE", "REQUEST_END"),
]


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    """Settings as they were at the start, before and after."""
    with httpx.Client(base_url=f"http://{running.http}", timeout=20) as client:
        yield client
        for path in (MODEL, SERVER):
            client.post(path, json=dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency")))
        assert client.get(MODEL).json() == client.get(SERVER).json() == DEFAULTS


@pytest.fixture
def stub(running: Running, client: httpx.Client) -> Iterator[Any]:
    with grpc.insecure_channel(running.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def post(client: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


# --- settings ---------------------------------------------------------------------------------------------------------


def test_trace_is_an_extension_of_the_server(client: httpx.Client) -> None:
    assert {"trace", "logging"} <= set(client.get("/v2").json()["extensions"])


def test_settings_of_a_model_come_from_the_server_until_it_has_its_own(client: httpx.Client) -> None:
    assert post(client, MODEL, trace_rate="5") == DEFAULTS | {"trace_rate": "5"}
    assert client.get(SERVER).json() == DEFAULTS
    assert post(client, SERVER, trace_rate="7", log_frequency="2") == DEFAULTS | {
        "trace_rate": "7",
        "log_frequency": "2",
    }
    assert client.get(MODEL).json() == DEFAULTS | {"trace_rate": "5", "log_frequency": "2"}
    assert client.get("/v2/models/identity/versions/1/trace/setting").status_code == 404  # as in Triton
    assert client.get("/v2/models/multi/trace/setting").json()["trace_rate"] == "7"
    assert post(client, MODEL, trace_rate=None)["trace_rate"] == "7"


def test_unknown_levels_and_fields_change_nothing(client: httpx.Client) -> None:
    assert post(client, SERVER, trace_level=["BOGUS"], nosuch=1) == DEFAULTS
    assert post(client, SERVER, trace_level=[]) == DEFAULTS


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (SERVER, {"trace_file": "/tmp/x"}, 501, "trace file location can not be updated through network protocol"),
        (SERVER, {"trace_level": ["OFF", "TENSORS"]}, 400, "Expect only one trace level 'OFF' is specified"),
        (SERVER, {"trace_level": "OFF"}, 500, "attempt to access JSON non-array as array"),
        (SERVER, {"trace_rate": 5}, 500, "attempt to access JSON non-string as string"),
        (SERVER, {"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
        (
            *(SERVER, {"trace_rate": "99999999999"}, 400),
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 99999999999",
        ),
        (SERVER, {"trace_count": "-2"}, 400, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        (SERVER, {"log_frequency": ""}, 400, "Unable to parse 'log_frequency', got: "),
        (
            *(SERVER, {"trace_level": ["TIMESTAMPS"]}, 400),
            "Attempting to set invalid trace setting :trace file name is not given",
        ),
        (SERVER, [], 500, "attempt to access JSON non-object as object"),
        ("/v2/models/nosuch/trace/setting", {}, 400, "Request for unknown model : nosuch"),
    ],
)
def test_bad_settings_are_refused_whole(client: httpx.Client, path: str, body: Any, status: int, error: str) -> None:
    fields = body | {"log_frequency": body.get("log_frequency", "9")} if isinstance(body, dict) else body
    response = client.post(path, json=fields)
    assert (response.status_code, response.json()) == (status, {"error": error})
    assert client.get(SERVER).json() == DEFAULTS


def test_an_unknown_model_has_no_settings(client: httpx.Client) -> None:
    response = client.get("/v2/models/nosuch/trace/setting")
    assert (response.status_code, response.text) == (400, '{"error":"Request for unknown model : nosuch"}')
    assert client.delete(SERVER).status_code == 405


def test_a_name_may_have_a_slash(client: httpx.Client) -> None:
    for path in ("models/a%2Fb/trace/setting", "repository/models/a%2Fb/load", "repository/models/a%2Fb/unload"):
        refused = client.post(f"/v2/{path}", json={})
        assert refused.status_code == 400 and "a/b" in refused.text, refused.text


def test_settings_over_grpc(stub: Any) -> None:
    def setting(model: str = "", **values: list[str]) -> dict[str, list[str]]:
        request = pb.TraceSettingRequest(model_name=model)
        for key, value in values.items():
            request.settings[key].value.extend(value)
        return {key: list(value.value) for key, value in stub.TraceSetting(request).settings.items()}

    defaults = {key: value if isinstance(value, list) else [value] for key, value in DEFAULTS.items()}
    assert setting() == defaults
    assert setting("identity", trace_rate=["5"], trace_count=["3"]) == defaults | {
        "trace_rate": ["5"],
        "trace_count": ["3"],
    }
    assert setting("identity", trace_rate=[]) == defaults | {"trace_count": ["3"]}
    refused: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"trace_file": ["x"]}, "UNIMPLEMENTED", "trace file location can not be updated through network protocol"),
        ({"trace_rate": ["1", "2"]}, "INVALID_ARGUMENT", "expect only 1 value for 'trace_rate'"),
        ({"trace_count": ["-2"]}, "INVALID_ARGUMENT", "'trace_count'. Expecting value >= -1, got: -2"),
    )
    for values, code, text in refused:
        with pytest.raises(grpc.RpcError) as caught:
            setting(**values)
        error: Any = caught.value
        assert error.code().name == code and text in error.details()
    with pytest.raises(grpc.RpcError) as caught:
        setting("nosuch")
    assert "Request for unknown model : nosuch" in str(caught.value)


def test_tritonclients_own_methods(running: Running, client: httpx.Client) -> None:
    with tritonclient.http.InferenceServerClient(running.http) as http_client:
        assert http_client.update_trace_settings("identity", {"trace_rate": "5"})["trace_rate"] == "5"
        assert http_client.get_trace_settings() == DEFAULTS
    with tritonclient.grpc.InferenceServerClient(running.grpc) as grpc_client:
        cleared = grpc_client.update_trace_settings("identity", {"trace_rate": None}, as_json=True)
        assert cleared["settings"]["trace_rate"] == {"value": ["1000"]}


# --- traces -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced(running: Running, tmp_path: Path) -> Iterator[Running]:
    """A server that traces every request into `trace.json` under `tmp_path`."""
    settings = TraceSettings(level=TraceLevel.TIMESTAMPS, rate=1, file=str(tmp_path / "trace.json"))
    traced = Running(tmp_path, trace=settings)
    yield traced
    if not traced.is_stopped:
        traced.stop()


def written(running: Running, tmp_path: Path) -> list[dict[str, Any]]:
    """Stops the server; the objects of its trace file."""
    running.stop()
    found: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())
    return found


def times(found: list[dict[str, Any]], trace_id: int = 1) -> dict[str, int]:
    """Activity → ns, of one trace. An activity comes once but for responses."""
    stamps = [item["timestamps"][0] for item in found if item["id"] == trace_id and "timestamps" in item]
    names = [stamp["name"] for stamp in stamps if stamp["name"] != "INFER_RESPONSE_COMPLETE"]
    assert len(names) == len(set(names))
    return {stamp["name"]: stamp["ns"] for stamp in stamps}


def test_an_http_infer_is_traced_from_its_first_to_its_last_byte(traced: Running, tmp_path: Path) -> None:
    began_ns = time.monotonic_ns()
    response = httpx.post(f"http://{traced.http}/v2/models/identity/infer", json=INFER | {"id": "t1"})
    assert response.status_code == 200
    found = written(traced, tmp_path)
    assert {"id": 1, "model_name": "identity", "model_version": 1, "request_id": "t1"} in found
    stamps = times(found)
    assert stamps.keys() == {*HTTP_TIMES, *MODEL_TIMES}
    order = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_END"]
    assert sorted(order, key=stamps.__getitem__) == order
    assert stamps["INFER_RESPONSE_COMPLETE"] <= stamps["HTTP_SEND_START"] <= stamps["HTTP_SEND_END"]
    assert began_ns < stamps["HTTP_RECV_START"] and stamps["HTTP_SEND_END"] < time.monotonic_ns()


def test_a_stream_over_http_is_traced_response_by_response(traced: Running, tmp_path: Path) -> None:
    response = httpx.post(f"http://{traced.http}/v2/models/llm/generate_stream", json={"text_input": "n=2"})
    assert response.text.count("data:") == 2
    found = written(traced, tmp_path)
    assert times(found).keys() == {*HTTP_TIMES, *MODEL_TIMES}
    assert str(found).count("INFER_RESPONSE_COMPLETE") == 3  # with the one that ends the stream, as in Triton


def test_generate_is_traced(traced: Running, tmp_path: Path) -> None:
    httpx.post(f"http://{traced.http}/v2/models/textid/generate", json={"text_input": "hi", "id": "g"})
    found = written(traced, tmp_path)
    assert times(found).keys() == {*HTTP_TIMES, *MODEL_TIMES}
    assert {"id": 1, "model_name": "textid", "model_version": 1, "request_id": "g"} in found


def test_the_choices_of_an_openai_request_are_one_trace(running: Running, tmp_path: Path) -> None:
    settings = TraceSettings(level=TraceLevel.TIMESTAMPS, rate=1, file=str(tmp_path / "trace.json"))
    traced = Running(tmp_path, start=mock_llm_host, trace=settings)
    body = {"model": MODEL_NAME, "prompt": ["hi", "ho"], "max_tokens": 3}
    assert httpx.post(f"http://{traced.http}/v1/completions", json=body, timeout=20).status_code == 200
    found = written(traced, tmp_path)
    assert [item.get("parent_id") for item in found if "model_name" in item] == [None, 1]
    assert times(found, 1).keys() == {*HTTP_TIMES, *MODEL_TIMES}
    assert times(found, 2).keys() == {*MODEL_TIMES} - {"INFER_RESPONSE_COMPLETE"}


def test_grpc_requests_and_streams_are_traced(traced: Running, tmp_path: Path) -> None:
    request = pb.ModelInferRequest(model_name="identity", id="u", raw_input_contents=[bytes(16)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
    stream = pb.ModelInferRequest(model_name="llm", id="s")
    tensor = stream.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"n=2")
    with grpc.insecure_channel(traced.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request)
        assert len(list(stub.ModelStreamInfer(iter([stream, stream])))) == 4
    traced.wait_until_nothing_is_open()
    found = written(traced, tmp_path)
    assert {item["id"]: item["request_id"] for item in found if "model_name" in item} == {1: "u", 2: "s", 3: "s"}
    for trace_id in (1, 2, 3):
        assert times(found, trace_id).keys() == {*GRPC_TIMES, *MODEL_TIMES}


def test_failed_and_refused_requests_close_their_traces(traced: Running, tmp_path: Path) -> None:
    with httpx.Client(base_url=f"http://{traced.http}", timeout=20) as client:
        assert client.post("/v2/models/identity/infer", content=b"{").status_code == 500
        assert client.post("/v2/models/nosuch/infer", json=INFER).status_code == 404  # not sampled: no such model
        assert client.post("/v2/models/textid/generate", json={"text_input": "fail"}).status_code == 400
        assert client.post("/v2/models/llm/generate", json={}).status_code == 400
    with grpc.insecure_channel(traced.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(pb.ModelInferRequest(model_name="identity"))
        (answer,) = stub.ModelStreamInfer(iter([pb.ModelInferRequest(model_name="identity")]))
        assert answer.error_message
    traced.wait_until_nothing_is_open()
    found = written(traced, tmp_path)
    assert {item["id"] for item in found} == {1, 2, 3, 4, 5}


def test_a_client_that_goes_away_closes_its_trace(traced: Running) -> None:
    url = f"http://{traced.http}/v2/models/llm/generate_stream"
    with httpx.stream("POST", url, json={"text_input": "n=1000 sleep=20"}) as response:
        chunks = response.iter_raw()  # one that is let go of closes the connection
        next(chunks)
        assert traced.host.tracing.open_count == 1
    traced.wait_until_nothing_is_open()
    eventually(lambda: not traced.host.tracing.open_count)


def test_a_grpc_client_that_goes_away_before_its_request_is_accepted_closes_its_trace(traced: Running) -> None:
    """Many strings are checked on a thread; here all of these threads are busy."""
    may_end = threading.Event()
    request = pb.ModelInferRequest(model_name="multi", raw_input_contents=[bytes(4 * 2 * MANY_STRINGS), bytes(8)])
    request.inputs.add(name="S", datatype="BYTES", shape=[2 * MANY_STRINGS])
    request.inputs.add(name="I", datatype="INT32", shape=[2, 1])

    async def occupy_threads() -> list[Any]:
        return [asyncio.ensure_future(traced.gate.run_in_thread(may_end.wait)) for _ in range(2)]

    busy = traced.call(occupy_threads())
    try:
        with grpc.insecure_channel(traced.grpc) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]))
            eventually(lambda: traced.host.tracing.open_count == 1)
            call.cancel()
            eventually(lambda: not traced.host.tracing.open_count)
    finally:
        may_end.set()
    eventually(lambda: all(one.done() for one in busy))
    traced.wait_until_nothing_is_open()


def test_tracing_is_switched_on_while_the_server_runs(running: Running, tmp_path: Path) -> None:
    with Running(tmp_path, trace=TraceSettings(file=str(tmp_path / "trace.json"))) as untraced:
        with httpx.Client(base_url=f"http://{untraced.http}", timeout=20) as client:
            client.post("/v2/models/identity/infer", json=INFER)
            post(client, MODEL, trace_level=["TIMESTAMPS", "TENSORS"], trace_rate="1", trace_count="1")
            client.post("/v2/models/identity/infer", json=INFER)
            client.post("/v2/models/identity/infer", json=INFER)
            assert client.get(MODEL).json()["trace_count"] == "0"
        eventually(lambda: (tmp_path / "trace.json.0").exists())  # written after the answer's last byte
        found = json.loads((tmp_path / "trace.json.0").read_text())
        tensor = {"name": "INPUT0", "data": "1,2,3,4", "shape": "1,4", "dtype": "FP32"}
        assert {"id": 1, "activity": "TENSOR_QUEUE_INPUT", "tensor": tensor} in found
        assert {"id": 1, "activity": "TENSOR_BACKEND_OUTPUT", "tensor": tensor | {"name": "OUTPUT0"}} in found
