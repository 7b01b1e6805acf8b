"""The metrics endpoint's text and the statistics message (golden 09, 10)."""

from __future__ import annotations

import prometheus_client
import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.metrics.model_metrics import MAX_RESPONSE_INDICES, FailureReason, Statistics
from llmbackend.frontends.operations.probes import render
from tests.helpers.core_host import ECHO_BACKEND, Repository, send, serving
from tests.helpers.waiting import eventually

MODEL_FAMILIES = [
    ("nv_inference_request_success", "counter"),
    ("nv_inference_request_failure", "counter"),
    ("nv_inference_count", "counter"),
    ("nv_inference_exec_count", "counter"),
    ("nv_inference_request_duration_us", "counter"),
    ("nv_inference_queue_duration_us", "counter"),
    ("nv_inference_compute_input_duration_us", "counter"),
    ("nv_inference_compute_infer_duration_us", "counter"),
    ("nv_inference_compute_output_duration_us", "counter"),
    ("nv_inference_pending_request_count", "gauge"),
    ("nv_model_load_duration_secs", "gauge"),
    ("nv_pinned_memory_pool_total_bytes", "gauge"),
    ("nv_pinned_memory_pool_used_bytes", "gauge"),
    ("nv_cpu_utilization", "gauge"),
    ("nv_cpu_memory_total_bytes", "gauge"),
    ("nv_cpu_memory_used_bytes", "gauge"),
]

MOODY_BACKEND = f"""{ECHO_BACKEND}
from llmbackend.core.backend_api import unavailable

def TRITONBACKEND_ModelInstanceReady(instance):
    if instance.name.startswith("moody"):
        raise unavailable("not today")
"""


def test_families_and_samples_have_the_names_of_triton(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m") as server:
        send(server, "m").responses()
        eventually(lambda: server.model_statistics("m")[0].execution_count == 1)
        lines = render(server.metrics_registry).decode().splitlines()
        assert [tuple(line.split()[2:]) for line in lines if line.startswith("# TYPE nv_")] == MODEL_FAMILIES
        labels = '{model="m",version="1"}'
        for line in (
            "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes",
            f"nv_inference_request_success{labels} 1",
            f"nv_inference_count{labels} 1",
            f"nv_inference_exec_count{labels} 1",
            f"nv_inference_pending_request_count{labels} 0",
        ):
            assert line in lines
        reasons = [line for line in lines if line.startswith("nv_inference_request_failure{")]
        assert reasons == [
            f'nv_inference_request_failure{{model="m",reason="{reason}",version="1"}} 0'
            for reason in ("REJECTED", "OTHER", "BACKEND", "CANCELED")
        ]
        server.unload_model("m")
        assert b'model="m"' not in render(server.metrics_registry)


def test_readiness_is_that_of_each_version_that_was_not_unloaded(repository: Repository) -> None:
    repository.backend("moody", MOODY_BACKEND)
    repository.backend("broken", "def TRITONBACKEND_ModelInitialize(model): raise RuntimeError('no')\n" + ECHO_BACKEND)
    for name, backend in (("calm", "moody"), ("moody", "moody"), ("failed", "broken"), ("gone", "moody")):
        repository.model(name, backend)
    with serving(repository, "calm", "moody", "gone") as server:
        with pytest.raises(TritonError):
            server.load_model("failed")
        server.unload_model("gone")
        lines = render(server.metrics_registry).decode().splitlines()
        assert [line for line in lines if line.startswith("llmbackend:model_ready")] == [
            'llmbackend:model_ready{model="calm",version="1"} 1',
            'llmbackend:model_ready{model="failed",version="1"} 0',
            'llmbackend:model_ready{model="moody",version="1"} 0',
        ]


def test_families_of_prometheus_client_are_printed_too() -> None:
    registry = prometheus_client.CollectorRegistry()
    counter = prometheus_client.Counter("requests", 'of "x"\\', ["who"], registry=registry)
    counter.labels('a"b\\c\nd').inc(1.5)
    assert render(registry).decode() == (
        '# HELP requests_total of "x"\\\\\n# TYPE requests_total counter\nrequests_total{who="a\\"b\\\\c\\nd"} 1.5\n'
    )


def test_statistics_of_models_that_are_not_ready(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("a", "echo")
    repository.model("b", "echo")
    with serving(repository, "a", "b") as server:
        assert [row.name for row in server.model_statistics()] == ["a", "b"]
        for name, version, message in (
            ("nosuch", -1, "requested model 'nosuch' is not available"),
            ("a", 9, "requested model version is not available for model 'a'"),
        ):
            with pytest.raises(TritonError) as caught:
                server.model_statistics(name, version)
            assert (caught.value.code, caught.value.message) == (ErrorCode.INVALID_ARG, message)
        (zero,) = server.model_statistics("a", 1)
        assert zero.inference_stats.HasField("cache_hit") and not zero.batch_stats and zero.last_inference == 0


@pytest.mark.parametrize(
    ("outcome", "output_start_ns", "infer", "output"),
    [
        ("success", 2, (1, 1), (1, 2)),
        ("empty_response", 0, (1, 3), (0, 0)),
        ("fail", 0, (1, 3), (0, 0)),
        ("fail", 2, (1, 1), (1, 2)),
        ("fail", 4, (1, 3), (0, 0)),
        ("cancel", 2, (0, 0), (0, 0)),
    ],
)
def test_what_a_response_adds_to_the_compute_times(
    outcome: str, output_start_ns: int, infer: tuple[int, int], output: tuple[int, int]
) -> None:
    statistics = Statistics()
    statistics.record_response(0, 1, output_start_ns, 4, outcome)
    row = statistics.snapshot("m", 1).response_stats["0"]
    assert (row.compute_infer.count, row.compute_infer.ns) == infer
    assert (row.compute_output.count, row.compute_output.ns) == output
    total = getattr(row, outcome)
    assert (total.count, total.ns) == (1, 3)


def test_the_last_inference_is_an_execution() -> None:
    statistics = Statistics()
    statistics.record_success(1, 10, 5, (1, 2, 3, 4))
    statistics.record_failure(10, FailureReason.REJECTED)
    assert statistics.snapshot("m", 1).last_inference == 0
    statistics.record_batch(1, (1, 2, 3, 4))
    assert statistics.snapshot("m", 1).last_inference > 0


def test_the_rows_of_responses_are_bounded() -> None:
    statistics = Statistics()
    for index in range(MAX_RESPONSE_INDICES + 10):
        statistics.record_response(index, 1, 2, 4, "success")
    rows = statistics.snapshot("m", 1).response_stats
    assert len(rows) == MAX_RESPONSE_INDICES
    first, last = rows["0"], rows[str(MAX_RESPONSE_INDICES - 1)]
    assert [(row.success.count, row.success.ns, row.compute_output.ns) for row in (first, last)] == [
        (1, 3, 2),
        (11, 33, 22),
    ]
    assert last.fail.count == 0 and last.HasField("fail")


def test_server_metadata(repository: Repository) -> None:
    with serving(repository, server_id="me") as server:
        metadata = server.server_metadata()
        assert metadata.name == "me" and "model_repository" in metadata.extensions
