"""Metrics of a compiled backend on the server's page, from when they are made until they are deleted."""

from __future__ import annotations

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.operations.probes import render
from tests.helpers.compiled_backends import TEXT_IO, CompiledRepository, ask, text_of
from tests.helpers.core_host import serving
from tests.helpers.waiting import eventually

MADE = """\
test_counts{a="1",b="x\\"y"} 0
test_counts 0
test_level{a="1"} 3
test_sizes_count 3
test_sizes_sum 103
test_sizes_bucket{le="1"} 1
test_sizes_bucket{le="2.5"} 2
test_sizes_bucket{le="10"} 2
test_sizes_bucket{le="+Inf"} 3
"""
WRONG = """\
a family of kind 3=Invalid argument: Unsupported kind passed to MetricFamily constructor.
a family of another kind=Already exists: Family name already exists with different type: 'test_counts' is a counter
a family's name=Invalid argument: Invalid metric name: 'not a name'
a label's name=Invalid argument: Invalid label name: 'not a name' of metric 'test_counts'
a label that is a number=Invalid argument: Parameter [n] must have a type of TRITONSERVER_PARAMETER_STRING to be added \
as a label.
a histogram without buckets=Invalid argument: Bucket boundaries not found in Metric args.
a histogram's buckets=Invalid argument: Bucket Boundaries must be strictly sorted, got [2.0, 1.0]
a counter with buckets=Invalid argument: Unexpected args found in counter Metric constructor.
a histogram with empty args=Invalid argument: Metric args not set to histogram kind.
Increment below 0=Invalid argument: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by \
non-negative values.
Set of a counter=Unsupported: TRITONSERVER_METRIC_KIND_COUNTER does not support Set
Observe of a gauge=Unsupported: TRITONSERVER_METRIC_KIND_GAUGE does not support Observe
Increment of a histogram=Unsupported: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment
Set of a histogram=Unsupported: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Set
Value of a histogram=Unsupported: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value
FamilyDelete before its metrics=Internal: Must call MetricDelete on all dependent metrics before calling \
MetricFamilyDelete.
"""


def page(server: InferenceServer) -> str:
    lines = render(server.metrics_registry).decode().splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("test_"))


def test_metrics_of_each_kind(inside: CompiledRepository) -> None:
    inside.model("m", "metrics", io=TEXT_IO)
    with serving(inside, "m") as server:
        made = text_of(ask(server, "make")).splitlines()
        assert made[3] == "GetMetricFamilyKind=2"
        assert made[9] == "GetMetricKind=1"
        assert {line.split("=")[1] for index, line in enumerate(made) if index not in (3, 9)} == {"OK"}
        assert page(server) == MADE
        assert text_of(ask(server, "change")).splitlines()[2:] == ["Value=2", "Value of a gauge=3"]
        assert text_of(ask(server, "wrong")) == WRONG
        assert page(server) == MADE.replace('"x\\"y"} 0', '"x\\"y"} 2')


def test_a_metric_stays_until_the_last_of_its_objects_is_deleted(inside: CompiledRepository) -> None:
    inside.model("m", "metrics", io=TEXT_IO)
    with serving(inside, "m") as server:
        text_of(ask(server, "make"))
        assert text_of(ask(server, "delete")) == "MetricDelete=OK\n"
        assert page(server) == MADE
        assert text_of(ask(server, "delete")) == "MetricDelete=OK\n"
        assert page(server) == MADE.split("\n", 1)[1]


def test_an_unloaded_models_metrics_go(inside: CompiledRepository) -> None:
    for name in ("m", "n"):
        inside.model(name, "metrics", io=TEXT_IO)
    with serving(inside, "m", "n") as server:
        for name in ("m", "n"):
            text_of(ask(server, "make", name))
        server.unload_model("m")
        eventually(lambda: not server.model_is_ready("m"))
        assert MADE.splitlines()[0] in page(server)  # the other model's
        server.unload_model("n")
        eventually(lambda: page(server) == "")
