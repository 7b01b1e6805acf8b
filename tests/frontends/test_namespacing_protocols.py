"""--model-namespacing on every protocol: what a name means, and a name that two repositories share."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.kserve_runner import Running

ECHO = """
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        response = request.new_response()
        response.add_output(Tensor("Y", "FP32", (2,), request.inputs["X"].data))
        response.send(ResponseFlag.FINAL)
        request.release()
"""
CONFIG = """
backend: "echo"
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
AMBIGUOUS = "There are 2 identifiers of model 'both' in global map, model namespace must be provided"
X = np.array([1, 2], np.float32)


def start_host(root: Path, **options: Any) -> InferenceServer:
    (root / "backends" / "echo").mkdir(parents=True)
    (root / "backends" / "echo" / "backend.py").write_text(ECHO)
    for repository, names in {"first": ("both", "one"), "second": ("both", "two")}.items():
        for name in names:
            (root / repository / name / "1").mkdir(parents=True)
            (root / repository / name / "config.pbtxt").write_text(CONFIG)
    server = InferenceServer(
        ServerOptions(
            model_repositories=[root / "first", root / "second"],
            backend_directory=root / "backends",
            model_namespacing=True,
            **options,
        )
    )
    server.start()
    return server


HOST_OPTIONS = {"start": start_host}


def over_http(running: Running, model: str) -> Any:
    tensor = httpclient.InferInput("X", [2], "FP32")
    tensor.set_data_from_numpy(X)
    with httpclient.InferenceServerClient(running.http) as client:
        return client.infer(model, [tensor]).as_numpy("Y")


def grpc_input() -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("X", [2], "FP32")
    tensor.set_data_from_numpy(X)
    return tensor


def over_grpc(running: Running, model: str) -> Any:
    with grpcclient.InferenceServerClient(running.grpc) as client:
        return client.infer(model, [grpc_input()]).as_numpy("Y")


def over_a_stream(running: Running, model: str) -> Any:
    results: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(running.grpc) as client:
        client.start_stream(lambda result, error: results.put(error or result))
        client.async_stream_infer(model, [grpc_input()])
        result = results.get(timeout=20)
        client.stop_stream()
    if isinstance(result, Exception):
        raise result
    return result.as_numpy("Y")


@pytest.mark.parametrize("infer", [over_http, over_grpc, over_a_stream])
def test_a_unique_name_is_served_and_a_shared_one_is_ambiguous(
    running: Running, infer: Callable[[Running, str], Any]
) -> None:
    for name in ("one", "two"):
        assert infer(running, name).tolist() == [1, 2]
    with pytest.raises(InferenceServerException, match=AMBIGUOUS):
        infer(running, "both")


def test_generate_and_stop_resolve_names_as_infer_does(running: Running) -> None:
    url = f"http://{running.http}/v2/models"
    answer = requests.post(f"{url}/one/generate", json={"X": [1.0, 2.0]}, timeout=20)
    assert (answer.status_code, answer.json()["Y"]) == (200, [1.0, 2.0])
    assert requests.post(f"{url}/one/stop", json={"id": "a"}, timeout=20).status_code == 200
    for path in ("generate", "generate_stream", "infer", "stop"):
        refused = requests.post(f"{url}/both/{path}", json={"X": [1.0, 2.0], "id": "a"}, timeout=20)
        assert refused.status_code == 400 and AMBIGUOUS in refused.text, path
