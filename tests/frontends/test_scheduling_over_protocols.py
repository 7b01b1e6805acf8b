"""Priorities, timeouts, the order of answers and the response cache as clients of HTTP and gRPC meet them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from kserve_runner import Running

from llmbackend.core.backend_api import Request, ResponseFlag, Tensor
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ServerOptions

BACKEND_FILE = "from test_scheduling_over_protocols import execute as TRITONBACKEND_ModelInstanceExecute"
IO = """max_batch_size: 1
input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }"""
CONFIGS = {
    "priorities": "dynamic_batching { priority_levels: 3 default_priority_level: 2 }",
    "timeouts": """dynamic_batching { default_queue_policy {
        allow_timeout_override: true default_timeout_microseconds: 60000000 } }""",
    "cached": "response_cache { enable: true }",
}
PROTOCOLS = ("http", "grpc")


class Stage:
    """What the backend executed, and the gates at which it waits."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.executed: list[tuple[str, int, int]] = []
        self.gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.began: defaultdict[str, threading.Event] = defaultdict(threading.Event)


STAGE = Stage()


def execute(instance: Any, requests: list[Request]) -> None:
    for request in requests:
        STAGE.executed.append((request.id, request.priority, request.timeout_us))
        STAGE.began[request.id].set()
        if request.id.startswith("gated"):
            assert STAGE.gates[request.id].wait(20)
        response = request.new_response()
        response.add_output(Tensor("Y", "FP32", (1, 1), request.inputs["X"].data))
        response.send(ResponseFlag.FINAL)
        request.release()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("scheduling")
    (root / "backends" / "staged").mkdir(parents=True)
    (root / "backends" / "staged" / "backend.py").write_text(BACKEND_FILE)
    for name, config in CONFIGS.items():
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(f'backend: "staged"\n{IO}\n{config}\n')
    server = Running(root, start=start_host)
    yield server
    server.stop()


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
    assert STAGE.began["gated"].wait(20)
    return first


def wait_until_queued(running: Running, model: str, count: int) -> None:
    statistics = running.host._lifecycle.get(model).statistics
    deadline = threading.Event()
    for _ in range(2000):
        if statistics.pending_count == count:
            return
        deadline.wait(0.005)
    raise AssertionError(f"{statistics.pending_count} requests are queued, expected {count}")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_priority_that_a_client_gives_decides_who_is_next(
    running: Running, infer: Callable[..., Future[Any]], protocol: str
) -> None:
    answers = [begin(infer, protocol, "priorities")]
    for count, (name, priority) in enumerate({"low": 3, "default": 0, "high": 1}.items(), 1):
        answers.append(infer(protocol, "priorities", name, priority=priority))
        wait_until_queued(running, "priorities", count)
    STAGE.gates["gated"].set()
    for answer in answers:
        answer.result(20)
    assert [name for name, *_ in STAGE.executed] == ["gated", "high", "default", "low"]
    assert [priority for _, priority, _ in STAGE.executed] == [2, 1, 2, 3]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_timeout_that_a_client_gives_ends_its_wait(infer: Callable[..., Future[Any]], protocol: str) -> None:
    first = begin(infer, protocol, "timeouts")
    late = infer(protocol, "timeouts", "late", timeout=1000)
    error = late.exception(20)  # while the instance is still busy
    assert "Request timeout expired" in str(error)
    assert error.status() in ("503", "StatusCode.UNAVAILABLE")  # type: ignore[union-attr]
    patient = infer(protocol, "timeouts", "patient", timeout=50_000_000)
    STAGE.gates["gated"].set()
    assert first.result(20) == 7 and patient.result(20) == 1
    assert [(name, timeout) for name, _, timeout in STAGE.executed] == [("gated", 0), ("patient", 50_000_000)]


def test_an_answer_over_one_protocol_is_a_hit_over_the_other(
    running: Running, infer: Callable[..., Future[Any]]
) -> None:
    assert infer("http", "cached", "first", 3).result(20) == 3
    assert infer("grpc", "cached", "second", 3).result(20) == 3
    assert [name for name, *_ in STAGE.executed] == ["first"]
    with tritonclient.http.InferenceServerClient(running.http) as client:
        (statistics,) = client.get_inference_statistics("cached")["model_stats"]
    counts = statistics["inference_stats"]
    assert (counts["cache_hit"]["count"], counts["cache_miss"]["count"]) == (1, 1)
    assert statistics["inference_count"] == 0  # this backend reports no statistics, and a hit is no inference
