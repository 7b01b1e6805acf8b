"""Ensembles through the real endpoints and Triton's own clients: infer, generate, streams, cancellation, load."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.helpers.kserve_runner import Running
from tests.helpers.kserve_scripted import RECORD

ENSEMBLES = {
    "twice": """max_batch_size: 8
        input { name: "IN" data_type: TYPE_FP32 dims: 4 } output { name: "OUT" data_type: TYPE_FP32 dims: 4 }
        ensemble_scheduling { step [
          { model_name: "spare" model_version: -1 input_map { key: "INPUT0" value: "IN" }
            output_map { key: "OUTPUT0" value: "mid" } },
          { model_name: "identity" model_version: -1 input_map { key: "INPUT0" value: "mid" }
            output_map { key: "OUTPUT0" value: "OUT" } } ] }""",
    "chat": """input { name: "text_input" data_type: TYPE_STRING dims: 1 }
        output { name: "text_output" data_type: TYPE_STRING dims: -1 }
        output { name: "n" data_type: TYPE_INT32 dims: 1 }
        ensemble_scheduling { step [
          { model_name: "llm" model_version: -1 input_map { key: "text_input" value: "text_input" }
            output_map { key: "text_output" value: "token" } },
          { model_name: "textid" model_version: -1 input_map { key: "text_input" value: "token" }
            output_map { key: "text_output" value: "text_output" } output_map { key: "n" value: "n" } } ] }""",
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("host")
    running = Running(root)
    for name, config in ENSEMBLES.items():
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(f'platform: "ensemble" {config}')
        running.host.load_model(name)
    yield running
    running.stop()


def words(text: str) -> list[Any]:
    given = triton_grpc.InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return [given]


@pytest.mark.parametrize("module", [triton_http, triton_grpc], ids=["http", "grpc"])
def test_infer_and_its_errors(running: Running, module: Any) -> None:
    address = running.http if module is triton_http else running.grpc
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    given = module.InferInput("IN", [2, 4], "FP32")
    given.set_data_from_numpy(values)
    with module.InferenceServerClient(address) as client:
        assert client.is_model_ready("spare")  # loaded for the ensemble's sake
        result = client.infer("twice", [given], request_id="7", sequence_id=5, sequence_start=True)
        assert np.array_equal(result.as_numpy("OUT"), values)
        response = result.get_response()
        if module is triton_http:
            expected = {"sequence_id": 5, "sequence_start": True, "sequence_end": False}
            assert response["parameters"] == expected and response["id"] == "7"
        else:
            assert response.parameters["sequence_id"].int64_param == 5 and response.id == "7"
        with pytest.raises(InferenceServerException, match="data-type is 'BYTES', but model 'twice' expects 'FP32'"):
            wrong = module.InferInput("IN", [1, 4], "BYTES")
            wrong.set_data_from_numpy(np.array([[b"a"] * 4], dtype=np.object_))
            client.infer("twice", [wrong])


def test_infer_refuses_a_decoupled_ensemble(running: Running) -> None:
    given = triton_http.InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"n=1"], dtype=np.object_))
    with (
        triton_http.InferenceServerClient(running.http) as client,
        pytest.raises(InferenceServerException, match="decoupled transaction policy"),
    ):
        client.infer("chat", [given])


def test_generate_and_generate_stream(running: Running) -> None:
    url = f"http://{running.http}/v2/models/chat"
    answer = httpx.post(f"{url}/generate", json={"text_input": "n=1", "id": "g"})
    assert answer.status_code == 200 and answer.json() == {
        "id": "g",
        "model_name": "chat",
        "model_version": "1",
        "n": 5,
        "sequence_end": False,
        "sequence_id": 0,
        "sequence_start": False,
        "text_output": " tok0",
    }
    with httpx.stream("POST", f"{url}/generate_stream", json={"text_input": "n=3"}) as stream:
        events = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
    assert [event["text_output"] for event in events] == [" tok0", " tok1", " tok2"]
    answer = httpx.post(f"{url}/generate", json={"text_input": "err=0"})
    assert answer.status_code == 400 and answer.json() == {"error": "in ensemble 'chat', boom at 0"}


def test_a_grpc_stream_of_a_decoupled_ensemble(running: Running) -> None:
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer("chat", words("n=4"), request_id="s", enable_empty_final_response=True)
        texts = []
        while True:
            result, error = results.get(timeout=20)
            assert error is None
            response = result.get_response()
            assert response.id == "s"
            if response.outputs:
                texts.append(result.as_numpy("text_output")[0])
            if response.parameters["triton_final_response"].bool_param:  # alone, or with the last text
                break
        assert texts == [b" tok0", b" tok1", b" tok2", b" tok3"]
        client.async_stream_infer("chat", words("n=4 err=2"), request_id="e")
        found = [results.get(timeout=20) for _ in range(3)]
        assert str(found[2][1]).endswith("in ensemble 'chat', boom at 2")
        client.stop_stream()


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_a_client_that_goes_away_cancels_the_step_that_runs(running: Running, way: str) -> None:
    request_id = f"gone-{way}"
    if way == "grpc":
        got: queue.Queue[Any] = queue.Queue()
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            client.start_stream(callback=lambda result, error: got.put((result, error)))
            client.async_stream_infer("chat", words("n=1000 sleep=20"), request_id=request_id)
            got.get(timeout=20)
            client.stop_stream(cancel_requests=True)
    else:
        body = {"text_input": "n=1000 sleep=20", "id": request_id}
        with httpx.stream("POST", f"http://{running.http}/v2/models/chat/generate_stream", json=body) as stream:
            next(stream.iter_lines())
    assert RECORD.cancelled[request_id].wait(20)
    running.wait_until_nothing_is_open()


def test_statistics_and_metrics(running: Running) -> None:
    with triton_http.InferenceServerClient(running.http) as client:
        given = triton_http.InferInput("IN", [1, 4], "FP32")
        given.set_data_from_numpy(np.zeros((1, 4), np.float32))
        read = partial(client.get_inference_statistics, "twice")
        before = read()["model_stats"][0]["inference_count"]
        client.infer("twice", [given])
        deadline_s = time.monotonic() + 10  # counted when the last step's request is gone, just after the response
        while read()["model_stats"][0]["inference_count"] != before + 1:
            assert time.monotonic() < deadline_s
    text = httpx.get(f"http://{running.metrics}/metrics").text
    assert 'nv_inference_pending_request_count{model="twice",version="1"} 0' in text
