"""Priorities, timeouts, the order of answers and the response cache as clients of HTTP and gRPC meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.core_host import STAGE, version_of
from tests.helpers.kserve_runner import Running
from tests.helpers.waiting import eventually

BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        STAGE.kept.append((request.id, request.priority, request.timeout_us))
        STAGE.open("began " + request.id)
        if request.id.startswith("gated"):
            STAGE.wait(request.id)
        response = request.new_response()
        response.add_output(Tensor("Y", "FP32", (1, 1), request.inputs["X"].data))
        response.send(ResponseFlag.FINAL)
        request.release()
"""
IO = """max_batch_size: 1
input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }"""
CONFIGS = {
    "priorities": "dynamic_batching { priority_levels: 3 default_priority_level: 2 }",
    "timeouts": """dynamic_batching { default_queue_policy {
        allow_timeout_override: true default_timeout_microseconds: 60000000 } }""",
    "cached": "response_cache { enable: true }",
}
PROTOCOLS = ("http", "grpc")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("scheduling")
    (root / "backends" / "staged").mkdir(parents=True)
    (root / "backends" / "staged" / "backend.py").write_text(BACKEND)
    for name, config in CONFIGS.items():
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(f'backend: "staged"\n{IO}\n{config}\n')
    with Running(root, start=start_host) as server:
        yield server


def start_host(root: Path) -> InferenceServer:
    host = InferenceServer(
        ServerOptions(
            model_repositories=[root / "models"],
            backend_directory=root / "backends",
            cache_config={"local": {"size": "100000"}},
        )
    )
    host.start()
    return host


@pytest.fixture
def infer(running: Running) -> Iterator[Callable[..., Future[Any]]]:
    """infer(protocol, model, id, **fields): a request of a real client, on a thread of its own."""
    STAGE.clear()
    with ThreadPoolExecutor(8) as pool:
        yield lambda *arguments, **fields: pool.submit(ask, running, *arguments, **fields)


def ask(running: Running, protocol: str, model: str, request_id: str, value: float = 1, **fields: Any) -> float:
    library: ModuleType = getattr(tritonclient, protocol)
    tensor = library.InferInput("X", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], np.float32))
    with library.InferenceServerClient(getattr(running, protocol)) as client:
        answer = client.infer(model, [tensor], request_id=request_id, **fields)
        return float(answer.as_numpy("Y")[0, 0])


def begin(infer: Callable[..., Future[Any]], protocol: str, model: str) -> Future[Any]:
    """Makes the model's only instance busy."""
    first = infer(protocol, model, "gated", 7)
    STAGE.wait("began gated")
    return first


def wait_until_queued(running: Running, model: str, count: int) -> None:
    statistics = version_of(running.host, model).statistics
    eventually(lambda: statistics.pending_count == count)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_priority_that_a_client_gives_decides_the_order(
    running: Running, infer: Callable[..., Future[Any]], protocol: str
) -> None:
    answers = [begin(infer, protocol, "priorities")]
    for count, (name, priority) in enumerate({"low": 3, "default": 0, "high": 1}.items(), 1):
        answers.append(infer(protocol, "priorities", name, priority=priority))
        wait_until_queued(running, "priorities", count)
    STAGE.open("gated")
    for answer in answers:
        answer.result(20)
    assert [name for name, *_ in STAGE.kept] == ["gated", "high", "default", "low"]
    assert [priority for _, priority, _ in STAGE.kept] == [2, 1, 2, 3]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_timeout_that_a_client_gives_ends_its_wait(infer: Callable[..., Future[Any]], protocol: str) -> None:
    first = begin(infer, protocol, "timeouts")
    late = infer(protocol, "timeouts", "late", timeout=1000)
    error = late.exception(20)  # while the instance is still busy
    assert "Request timeout expired" in str(error)
    assert error.status() in ("503", "StatusCode.UNAVAILABLE")  # type: ignore[union-attr]
    patient = infer(protocol, "timeouts", "patient", timeout=50_000_000)
    STAGE.open("gated")
    assert first.result(20) == 7 and patient.result(20) == 1
    assert [(name, timeout) for name, _, timeout in STAGE.kept] == [("gated", 0), ("patient", 50_000_000)]


def test_an_answer_over_one_protocol_is_a_hit_over_the_other(
    running: Running, infer: Callable[..., Future[Any]]
) -> None:
    assert infer("http", "cached", "first", 3).result(20) == 3
    assert infer("grpc", "cached", "second", 3).result(20) == 3
    assert [name for name, *_ in STAGE.kept] == ["first"]
    with tritonclient.http.InferenceServerClient(running.http) as client:
        (statistics,) = client.get_inference_statistics("cached")["model_stats"]
    counts = statistics["inference_stats"]
    assert (counts["cache_hit"]["count"], counts["cache_miss"]["count"]) == (1, 1)
    assert statistics["inference_count"] == 0  # this backend reports no statistics, and a hit is no inference
