"""`--metrics-config` and its neighbours: families, histograms, summaries, tags, and the flags' texts."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable

import numpy as np
import pytest
import typer

from llmbackend.cli.flags.endpoints import SharedMemoryFlags
from llmbackend.cli.flags.observability import MetricsConfigFlags
from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.metrics import model_metrics, nv_metrics
from llmbackend.core.metrics.metrics_options import DEFAULT_QUANTILES, MetricsOptions, Quantile, with_metrics_config
from llmbackend.core.metrics.model_metrics import SAMPLES_PER_SLICE, SLICES, Summary
from llmbackend.core.metrics.nv_metrics import CpuMetrics
from llmbackend.frontends.operations.probes import render
from llmbackend.server.ports import Endpoint
from tests.helpers.core_host import ECHO_BACKEND, Repository, send, serving
from tests.helpers.waiting import eventually

HISTOGRAM = "nv_inference_first_response_histogram_ms"
SUMMARIES = [
    f"nv_inference_{what}_summary_us"
    for what in ("request", "queue", "compute_input", "compute_infer", "compute_output")
]
CACHE = {"local": {"size": "1048576"}}
LABELS = '{model="m",version="1"}'

# Waits `sleep_ms` before its first response, then sends a second one.
STREAM_BACKEND = """
import time
from llmbackend.core.backend_api import ResponseFlag

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        time.sleep(request.parameters.get("sleep_ms", 0) / 1000)
        request.new_response().send()
        request.new_response().send(ResponseFlag.FINAL)
        now = time.monotonic_ns()
        instance.report_statistics(request, True, now, now, now, now)
        request.release()
"""


def text(server: InferenceServer) -> list[str]:
    return render(server.metrics_registry).decode().splitlines()


def families(server: InferenceServer) -> list[str]:
    return [line.split()[2] for line in text(server) if line.startswith("# TYPE nv_")]


def samples(server: InferenceServer, family: str) -> list[str]:
    """Lines of the family's samples, with every value that time decides replaced."""
    return [line for line in text(server) if line.startswith(family)]


def options(**changes: object) -> MetricsOptions:
    return MetricsOptions(**changes)  # type: ignore[arg-type]


def test_counter_latencies_can_be_switched_off(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m") as server:
        usual = families(server)
    with serving(repository, "m", metrics=options(counter_latencies=False)) as server:
        left = families(server)
    assert [name for name in usual if name not in left] == [
        f"nv_inference_{what}_duration_us"
        for what in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    ]
    assert "nv_inference_count" in left and not [name for name in usual if "summary" in name or "histogram" in name]


def test_cpu_metrics_can_be_switched_off(repository: Repository) -> None:
    with serving(repository, metrics=options(cpu_metrics=False)) as server:
        assert not [name for name in families(server) if name.startswith("nv_cpu")]


def test_there_is_no_pinned_memory_and_its_metrics_say_so(repository: Repository) -> None:
    with serving(repository) as server:
        assert samples(server, "nv_pinned_memory_pool") == [
            "nv_pinned_memory_pool_total_bytes 0",
            "nv_pinned_memory_pool_used_bytes 0",
        ]


def test_the_first_response_of_every_model_has_a_histogram(repository: Repository) -> None:
    repository.backend("stream", STREAM_BACKEND)
    repository.model("m", "stream", "model_transaction_policy { decoupled: true }")
    repository.model("other", "stream")
    with serving(repository, "m", "other", metrics=options(histogram_latencies=True)) as server:
        for sleep_ms in (0, 0, 150):
            assert len(send(server, "m", parameters={"sleep_ms": sleep_ms}).responses()) == 2
        send(server, "other").responses()
        lines = samples(server, HISTOGRAM)
        assert lines[0] == f"{HISTOGRAM}_count{LABELS} 3"
        (total,) = re.findall(rf"{HISTOGRAM}_sum\S* (\d+)", "\n".join(lines[:7]))
        assert 150 <= int(total) < 2000
        assert [line.rpartition(" ")[0] for line in lines[2:7]] == [
            f'{HISTOGRAM}_bucket{{model="m",version="1",le="{bound}"}}' for bound in (100, 500, 2000, 5000, "+Inf")
        ]
        assert lines[2].endswith(" 2") and lines[6].endswith(" 3")
        assert lines[7] == f'{HISTOGRAM}_count{{model="other",version="1"}} 1'
        assert families(server)[-1] == HISTOGRAM


def test_the_histogram_is_off_unless_asked_for(repository: Repository) -> None:
    repository.backend("stream", STREAM_BACKEND)
    repository.model("m", "stream", "model_transaction_policy { decoupled: true }")
    with serving(repository, "m") as server:
        send(server, "m").responses()
        assert HISTOGRAM not in families(server)


def test_model_metrics_sets_the_buckets_of_a_model(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    control = (
        'metric_control {{ metric_identifier {{ family: "{}" }} histogram_options {{ buckets: [ -1, 0.0, 1, 2.5 ] }} }}'
    )
    repository.backend("stream", STREAM_BACKEND)
    repository.model(
        "m",
        "stream",
        f"model_transaction_policy {{ decoupled: true }} "
        f"model_metrics {{ {control.format(HISTOGRAM)} {control.format('nosuch')} }}",
    )
    chosen = options(histogram_latencies=True)
    with caplog.at_level(logging.WARNING), serving(repository, "m", metrics=chosen) as server:
        bounds = re.findall(r'le="([^"]+)"', "\n".join(samples(server, HISTOGRAM)))
    assert bounds == ["-1", "0", "1", "2.5", "+Inf"]
    assert "Metric family 'nosuch' in 'metric_identifier' is not a customizable metric in Triton core." in caplog.text


def test_summaries_have_count_sum_and_quantiles(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    chosen = options(summary_latencies=True, summary_quantiles=(Quantile(0.5, 0.05), Quantile(0.999, 0.001)))
    with serving(repository, "m", metrics=chosen) as server:
        assert samples(server, SUMMARIES[0])[-1] == f'{SUMMARIES[0]}{{model="m",version="1",quantile="0.999"}} NaN'
        for _ in range(3):
            send(server, "m").responses()
        eventually(lambda: server.model_statistics("m")[0].inference_stats.success.count == 3)
        assert families(server)[-5:] == SUMMARIES
        for name in SUMMARIES:
            lines = samples(server, name)
            assert [line.rpartition(" ")[0] for line in lines] == [
                f"{name}_count{LABELS}",
                f"{name}_sum{LABELS}",
                f'{name}{{model="m",version="1",quantile="0.5"}}',
                f'{name}{{model="m",version="1",quantile="0.999"}}',
            ]
            count, total, middle, most = (float(line.rpartition(" ")[2]) for line in lines)
            assert count == 3 and middle <= most <= total <= 3 * most
        (request_sum,) = re.findall(rf"{SUMMARIES[0]}_sum\S* (\d+)", "\n".join(text(server)))
        nanoseconds = server.model_statistics("m")[0].inference_stats.success.ns
        assert nanoseconds // 1000 - 3 <= int(request_sum) <= nanoseconds // 1000


def test_a_model_with_a_response_cache_has_summaries_of_it_instead_of_its_requests(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", "response_cache { enable: true }")
    chosen = options(summary_latencies=True)
    with serving(repository, "m", metrics=chosen, cache_config=CACHE) as server:
        for _ in range(3):
            send(server, "m").responses()
        names = [name for name in families(server) if "summary" in name]
        assert names == [*SUMMARIES[1:], "nv_cache_hit_summary_per_model", "nv_cache_miss_summary_per_model"]
        counts = [samples(server, name)[0] for name in (SUMMARIES[1], SUMMARIES[2], *names[-2:])]
        assert [int(line.rpartition(" ")[2]) for line in counts] == [3, 1, 2, 1]
    with serving(repository, "m", metrics=options(counter_latencies=False), cache_config=CACHE) as server:
        assert not [name for name in families(server) if name.endswith(("_per_model", "_duration_us"))]


def test_metric_tags_label_every_family_of_the_model(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", 'metric_tags { key: "team" value: "blue" }')
    with serving(repository, "m", metrics=options(summary_latencies=True)) as server:
        lines = [line for line in text(server) if line.startswith("nv_") and 'model="m"' in line]
        assert len(lines) > 20 and all('{_team="blue",model="m",' in line for line in lines)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_quantiles_are_of_the_last_minute_and_totals_of_all() -> None:
    clock = Clock()
    summary = Summary(clock)
    for value in range(1, 101):
        summary.observe(value)
    assert summary.snapshot([0.5, 0.9, 0.99, 1.0]) == (100, 5050, [50, 90, 99, 100])
    clock.now_s += 30
    summary.observe(1000)
    assert summary.snapshot([1.0])[2] == [1000]
    clock.now_s += 31
    assert summary.snapshot([0.0])[2] == [1000]
    clock.now_s += 60
    count, total, (median,) = summary.snapshot([0.5])
    assert (count, total) == (101, 6050) and math.isnan(median)


def test_a_summary_stays_small_and_near_the_truth_however_many_requests_come() -> None:
    clock = Clock()
    summary = Summary(clock)
    values = np.random.default_rng(1).permutation(20 * SAMPLES_PER_SLICE)
    for value in values.tolist():
        summary.observe(value)
    assert sum(len(each.values) for each in summary._slices) == SAMPLES_PER_SLICE
    (median,) = summary.snapshot([0.5])[2]
    assert abs(median / len(values) - 0.5) < 0.05
    for _ in range(3 * SLICES):
        clock.now_s += 20
        summary.observe(1)
    assert len(summary._slices) == SLICES


def test_the_machine_is_read_at_most_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    busy = iter([(0.0, 0.0), (30.0, 100.0), (30.0, 200.0)])
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(nv_metrics, "_cpu_times", lambda: next(busy))
    metrics = CpuMetrics(options(interval_ms=2000))

    def utilization() -> float:
        return next(iter(metrics.collect())).samples[0].value

    assert utilization() == 0.0
    clock.now_s += 2
    assert utilization() == 0.3
    clock.now_s += 1.9
    assert utilization() == 0.3
    clock.now_s += 0.1
    assert utilization() == 0.0


def test_settings_are_read_as_triton_writes_them() -> None:
    read = with_metrics_config(
        MetricsOptions(),
        [
            "counter_latencies=false",
            "histogram_latencies=true",
            "summary_latencies=true",
            'summary_quantiles="0.1:0.0.5,1:0"',  # numbers as C++ reads them: as far as they go
        ],
    )
    assert read == MetricsOptions(False, True, True, (Quantile(0.1, 0.0), Quantile(1, 0)))
    assert [each.quantile for each in DEFAULT_QUANTILES] == [0.5, 0.9, 0.95, 0.99, 0.999]
    assert model_metrics.DEFAULT_BUCKETS_MS == (100, 500, 2000, 5000)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("counter_latencies", "format is '<setting>=<value>'. Got counter_latencies"),
        ("counter_latencies=", "format is '<setting>=<value>'. Got counter_latencies="),
        ("counter_latencies=maybe", "expected true or false"),
        ("nosuch=1", "no setting 'nosuch', expected counter_latencies"),
        ("summary_quantiles=0.5", "[0.5]. No ':' delimiter found. Expected format is <quantile>:<error>"),
        ("summary_quantiles=a:b", "Invalid option: [a:b]"),
        ("summary_quantiles=2:0.1", "out of the range [0, 1]"),
        ("summary_quantiles=nan:0.1", "out of the range [0, 1]"),
    ],
)
def test_a_setting_that_is_not_understood_ends_with_a_message_that_names_it(item: str, words: str) -> None:
    with pytest.raises(typer.BadParameter, match=re.escape(words)):
        MetricsConfigFlags(metrics_config=[item]).options()


def test_the_flags_are_the_options() -> None:
    flags = MetricsConfigFlags(
        metrics_config=["summary_latencies=true"], metrics_interval_ms=5, allow_cpu_metrics=False
    )
    assert flags.options() == MetricsOptions(summary_latencies=True, interval_ms=5, cpu_metrics=False)
    assert MetricsConfigFlags().options() == MetricsOptions()


@pytest.mark.parametrize(
    ("flag", "http", "grpc", "allowed"),
    [
        (None, "127.0.0.1", "localhost", True),
        (None, "127.0.0.1", "0.0.0.0", False),
        (None, "0.0.0.0", "::1", False),
        (True, "0.0.0.0", "0.0.0.0", True),
        (False, "127.0.0.1", "127.0.0.1", False),
    ],
)
def test_shared_memory_is_for_clients_of_this_machine_unless_the_flag_says_more(
    flag: bool | None, http: str, grpc: str, allowed: bool
) -> None:
    endpoints: Callable[[str], Endpoint] = lambda address: Endpoint(address=address, port=1)  # noqa: E731
    assert SharedMemoryFlags(flag).allowed(endpoints(http), endpoints(grpc)) is allowed
    closed = Endpoint(address="0.0.0.0", port=1, enabled=False)
    assert SharedMemoryFlags().allowed(endpoints("127.0.0.1"), closed)


@pytest.mark.parametrize("tag", ["", "a-b", "_a", "é", 'a\\"b', "a b"])
def test_a_tag_that_would_spoil_the_text_is_refused_at_load(repository: Repository, tag: str) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", f'metric_tags {{ key: "{tag}" value: "x" }}')
    with serving(repository) as server, pytest.raises(TritonError, match="is not a valid label name"):
        server.load_model("m")


def test_values_of_tags_are_escaped(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", 'metric_tags { key: "t" value: "a\\"b\\n" }')
    with serving(repository, "m") as server:
        assert 'nv_inference_count{_t="a\\"b\\n",model="m",version="1"} 0' in text(server)
