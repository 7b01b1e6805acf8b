"""Trace mode opentelemetry: spans of real requests, sent by OTLP to a collector that this test runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.core.tracing.manager import TraceManager
from llmbackend.core.tracing.trace import OpenTelemetryOptions, TraceLevel, TraceSettings
from tests.helpers.kserve_runner import Running

pytest.importorskip("opentelemetry.sdk")
from llmbackend.core.tracing import open_telemetry
from tests.helpers.otlp_collector import Collector, attributes, collecting, collecting_by_grpc, events

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
INFER = {"id": "t1", "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module", autouse=True)
def grpc_has_started(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What gRPC keeps for the whole process is not left behind by the first test."""
    Running(tmp_path_factory.mktemp("first")).stop()


def settings(collector: Collector, rate: int = 1, url: str = "", **more: Any) -> TraceSettings:
    options = OpenTelemetryOptions(url=url or collector.url, resource={"service.version": "7", "test.key": "value"})
    return TraceSettings(level=TraceLevel.TIMESTAMPS, rate=rate, mode="opentelemetry", open_telemetry=options, **more)


def test_a_request_becomes_three_nested_spans(collector: Collector, tmp_path: Path) -> None:
    running = Running(tmp_path, trace=settings(collector, url=collector.url.removeprefix("http://")))  # Triton's form
    assert httpx.post(f"http://{running.http}/v2/models/identity/infer", json=INFER).status_code == 200
    running.stop()
    root, model, compute = (collector.named(name) for name in ("InferRequest", "identity", "compute"))
    assert len(collector.spans) == 3 and not root.parent_span_id
    assert (model.parent_span_id, compute.parent_span_id) == (root.span_id, model.span_id)
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert attributes(model) == {
        "triton.model_name": "identity",
        "triton.model_version": 1,
        "triton.trace_id": 1,
        "triton.trace_parent_id": 0,
        "triton.request_id": "t1",
    }
    assert sorted(events(root)) == sorted(
        ["HTTP_RECV_START", "HTTP_RECV_END", "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]
    )
    assert events(model) == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert events(compute) == ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert root.start_time_unix_nano <= model.start_time_unix_nano <= compute.start_time_unix_nano
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in collector.spans)
    assert (
        collector.resources[0].items()
        >= {
            "service.name": "triton-inference-server",
            "service.version": "7",
            "test.key": "value",
        }.items()
    )


def test_spans_go_to_a_grpc_collector_under_the_name_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    with collecting_by_grpc() as (collector, port):
        options = OpenTelemetryOptions(url=f"grpc://127.0.0.1:{port}", uses_grpc=True)
        trace = TraceSettings(level=TraceLevel.TIMESTAMPS, rate=1, mode="opentelemetry", open_telemetry=options)
        running = Running(tmp_path, trace=trace)
        assert httpx.post(f"http://{running.http}/v2/models/identity/infer", json=INFER).status_code == 200
        running.stop()
        assert {span.name for span in collector.spans} == {"InferRequest", "identity", "compute"}
        assert collector.resources[0]["service.name"] == "chat"


def test_a_clients_trace_goes_on_over_http_and_grpc_at_any_rate(collector: Collector, tmp_path: Path) -> None:
    running = Running(tmp_path, trace=settings(collector, rate=0))
    url = f"http://{running.http}/v2/models/identity/infer"
    httpx.post(url, json=INFER)  # carries no trace, so it gets none
    httpx.post(url, json=INFER, headers={"traceparent": "00-nonsense-01"})
    answer = httpx.post(url, json=INFER, headers=PARENT)
    assert answer.status_code == 200
    stream = pb.ModelInferRequest(model_name="llm")
    stream.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"n=2")
    unary = pb.ModelInferRequest(model_name="identity", raw_input_contents=[bytes(16)])
    unary.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
    with grpc.insecure_channel(running.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        _, call = stub.ModelInfer.with_call(unary, metadata=tuple(PARENT.items()))
        assert len(list(stub.ModelStreamInfer(iter([stream]), metadata=tuple(PARENT.items())))) == 2
    running.wait_until_nothing_is_open()
    running.stop()
    roots = [span for span in collector.spans if span.name == "InferRequest"]
    told = {f"00-{TRACE_ID}-{span.span_id.hex()}-01" for span in roots}
    assert {answer.headers["traceparent"], dict(call.initial_metadata())["traceparent"]} < told
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in roots} == {(TRACE_ID, SPAN_ID)}
    starts = [name for span in roots for name in events(span) if name in ("HTTP_RECV_START", "GRPC_WAITREAD_START")]
    assert sorted(starts) == ["GRPC_WAITREAD_START", "GRPC_WAITREAD_START", "HTTP_RECV_START"]


def test_the_settings_endpoint_shows_the_mode_and_its_options(collector: Collector, tmp_path: Path) -> None:
    with Running(tmp_path, trace=settings(collector, rate=3)) as running:
        assert httpx.get(f"http://{running.http}/v2/trace/setting").json() == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "3",
            "trace_count": "-1",
            "trace_mode": "opentelemetry",
            "url": collector.url,
            "resource": "service.version=7,test.key=value",
            "bsp_max_queue_size": "2048",
            "bsp_schedule_delay": "5000",
            "bsp_max_export_batch_size": "512",
        }


def test_a_backend_gets_the_context_of_its_models_span_and_children_nest(collector: Collector) -> None:
    manager = TraceManager(settings(collector))
    manager.start()
    trace = manager.sample("outer", lambda name: None)
    assert trace is not None
    trace.begin("outer", 1, "", trace.trace.root_span.start_time - 1)
    child = trace.child()
    assert child is not None
    child.begin("inner", 2, "", 0)
    child.end()
    trace.end()
    trace.close()
    manager.close()
    outer, inner = collector.named("outer"), collector.named("inner")
    assert inner.parent_span_id == outer.span_id
    assert f"-{outer.trace_id.hex()}-{outer.span_id.hex()}-" in trace.context


def test_a_step_of_the_clock_moves_later_traces(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = TraceManager(settings(collector))
    manager.start()
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 3600 * 10**9)
    trace = manager.sample("stepped", lambda name: None)
    assert trace is not None
    trace.begin("stepped", 1, "", time.monotonic_ns())
    trace.end()
    trace.close()
    manager.close()
    span = collector.named("stepped")
    assert span.start_time_unix_nano >= now_ns + 3600 * 10**9
    assert span.end_time_unix_nano >= span.start_time_unix_nano


OUTER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        inner = pb_utils.InferenceRequest(model_name="inner", requested_output_names=["Y"], trace=request.trace(),
                                          inputs=[pb_utils.get_input_tensor_by_name(request, "X")])
        assert not inner.exec().has_error()
        told = np.array([request.trace().get_context()], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", told)])]
"""
INNER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])]
"""
PYTHON = """backend: "python" input { name: "X" data_type: TYPE_STRING dims: 1 }
output { name: "Y" data_type: TYPE_STRING dims: 1 } """


def python_host(root: Path, **options: Any) -> InferenceServer:
    for name, code in (("outer", OUTER), ("inner", INNER)):
        folder = root / "models" / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(code)
        (folder.parent / "config.pbtxt").write_text(PYTHON)
    server = InferenceServer(ServerOptions(model_repositories=[root / "models"], **options))
    server.start()
    return server


def test_a_python_model_knows_its_span_and_hands_its_trace_on_to_models_it_calls(
    collector: Collector, tmp_path: Path
) -> None:
    running = Running(tmp_path, start=python_host, trace=settings(collector))
    body = {"inputs": [{"name": "X", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    answer = httpx.post(f"http://{running.http}/v2/models/outer/infer", json=body, timeout=20)
    running.stop()
    outer, inner = collector.named("outer"), collector.named("inner")
    assert inner.parent_span_id == outer.span_id and len(collector.spans) == 5
    context = json.loads(answer.json()["outputs"][0]["data"][0])
    assert context["traceparent"].startswith(f"00-{outer.trace_id.hex()}-{outer.span_id.hex()}-")


def test_an_absent_collector_hurts_no_request_and_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_telemetry, "CLOSE_TIMEOUT_S", 0.2)
    options = OpenTelemetryOptions(
        url="http://127.0.0.1:1/v1/traces", bsp_max_queue_size=4, bsp_max_export_batch_size=2
    )
    wanted = TraceSettings(level=TraceLevel.TIMESTAMPS, rate=1, mode="opentelemetry", open_telemetry=options)
    running = Running(tmp_path, trace=wanted)
    with httpx.Client(base_url=f"http://{running.http}") as client:
        assert all(client.post("/v2/models/identity/infer", json=INFER).status_code == 200 for _ in range(20))
    began_s = time.monotonic()
    running.stop()
    assert running.host.tracing.open_count == 0 and time.monotonic() - began_s < 5


def test_without_the_sdk_the_mode_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llmbackend.core.tracing.open_telemetry", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    manager = TraceManager(TraceSettings(mode="opentelemetry"))
    with pytest.raises(TritonError, match=r"pip install 'llmbackend\[opentelemetry\]'") as caught:
        manager.start()
    assert caught.value.code is ErrorCode.UNSUPPORTED
