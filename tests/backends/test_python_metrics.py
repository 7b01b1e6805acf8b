"""Custom metrics of python models: what is exported, and what is refused in Triton's words."""

from __future__ import annotations

import json
from typing import Any

from llmbackend.frontends.operations.probes import render
from tests.helpers.python_host import Host
from tests.helpers.python_models import TEXT_CONFIG, answer_line, body, text, values

HELPERS = """
def refused(call, *args, **named):
    try:
        call(*args, **named)
    except pb_utils.TritonModelException as e:
        return str(e)
F = pb_utils.MetricFamily
"""


def run(host: Host, execute: str, name: str = "m") -> Any:
    """What the execute of a model puts into `seen`, whose families stay in `kept`."""
    lines = HELPERS + execute + "self.kept = locals()\n" + answer_line("json.dumps(seen)")
    host.load(name, TEXT_CONFIG, body(lines))
    return json.loads(values(host.infer(name, text("x")).one())["R"][0])  # type: ignore[arg-type]


def page(host: Host) -> str:
    return render(host.server.metrics_registry).decode()


def test_metrics_are_exported_at_zero_as_soon_as_they_are_made(host: Host) -> None:
    execute = """
counters, gauges = F(b"made_total", b"Made.", F.COUNTER), F("made", "Made.", F.GAUGE)
histograms = F("made_s", "Made.", F.HISTOGRAM)
empty = F("without_metrics", "None.", F.COUNTER)
made = [counters.Metric({"b": "2", "a": "1"}), gauges.Metric(), histograms.Metric(labels={"a": "1"}, buckets=[0.5, 1])]
bare = histograms.Metric({"a": "2"}, [])
seen = [made[0].value(), made[1].value()]
"""
    assert run(host, execute) == [0, 0]
    assert '# TYPE made_total counter\nmade_total{a="1",b="2"} 0\n' in page(host)
    assert "# TYPE made gauge\nmade 0\n" in page(host)
    for line in (
        'made_s_count{a="1"} 0\nmade_s_sum{a="1"} 0\nmade_s_bucket{a="1",le="0.5"} 0\nmade_s_bucket{a="1",le="1"} 0\n',
        'made_s_bucket{a="1",le="+Inf"} 0\n',
        'made_s_bucket{a="2",le="+Inf"} 0\n',
    ):
        assert line in page(host)
    assert "without_metrics" not in page(host)
    assert 'made_s_bucket{a="2",le="0.5"}' not in page(host)


def test_metrics_count_and_the_same_labels_are_the_same_metric(host: Host) -> None:
    execute = """
f = F("of_kind", "d", F.COUNTER)
one, same, other = f.Metric({"a": "b", "c": "d"}), f.Metric({"c": "d", "a": "b"}), f.Metric({"a": "x", "c": "d"})
one.increment(1.5)
same.increment(2)
g = F("a_gauge", "d", F.GAUGE)
gauge = g.Metric()
gauge.set(7)
gauge.increment(-3)
h = F("a_histogram", "d", F.HISTOGRAM)
histogram = h.Metric({"a": "b"}, [1, 2])
for value in (1, 1.5, 7):
    histogram.observe(value)
seen = [one.value(), same.value(), other.value(), gauge.value()]
"""
    assert run(host, execute) == [3.5, 3.5, 0, 4]
    sample = host.server.metrics_registry.get_sample_value
    bounds = {"1": 1, "2": 2, "+Inf": 3}
    assert {le: sample("a_histogram_bucket", {"a": "b", "le": le}) for le in bounds} == bounds


def test_a_family_has_metrics_with_different_labels_and_its_first_description(host: Host) -> None:
    execute = """
first, again = F("shared_total", "First description.", F.COUNTER), F("shared_total", "Second description.", F.COUNTER)
made = [first.Metric(), first.Metric({"a": "1"}), again.Metric({"b": "2", "c": "3"})]
made[2].increment(2)
seen = 0
"""
    run(host, execute)
    run(host, execute.replace("made[2]", "made[1]"), name="other")
    assert (
        "# HELP shared_total First description.\n# TYPE shared_total counter\n"
        'shared_total 0\nshared_total{a="1"} 2\nshared_total{b="2",c="3"} 2\n'
    ) in page(host)
    assert "Second description." not in page(host)
    host.server.unload_model("m")
    assert host.server.stop(10.0)
    assert "shared_total" not in page(host)


def test_what_a_metric_can_not_is_refused_in_tritons_words(host: Host) -> None:
    execute = """
c, g, h = F("c", "d", F.COUNTER), F("g", "d", F.GAUGE), F("h", "d", F.HISTOGRAM)
counter, gauge, histogram = c.Metric(), g.Metric(), h.Metric(buckets=[1])
gone = F("gone", "d", F.COUNTER).Metric()
seen = [
    refused(F, "c", "d", F.GAUGE), refused(F, "no name", "d", F.COUNTER), refused(F, "n", "d", "x"),
    refused(counter.increment, -1), refused(counter.set, 1), refused(gauge.observe, 1), refused(histogram.value),
    refused(h.Metric), refused(h.Metric, buckets=(1, 2)), refused(g.Metric, buckets=[1]),
    refused(h.Metric, buckets=[2.5, 0.1]), refused(h.Metric, buckets=[1, 1, 2]), refused(h.Metric, {"le": "1"}, [1]),
    refused(c.Metric, ["a"]), refused(c.Metric, {"a": 1}), refused(c.Metric, {"a b": "1"}), refused(gone.increment, 1),
]
"""
    told = [
        "Error when creating MetricFamily: Family name already exists with different type",
        "Error when creating MetricFamily: Invalid metric name: 'no name'",
        "Unknown metric kind 'x'",
        "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically",
        "Failed to set metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Set",
        "Failed to observe metric value: TRITONSERVER_METRIC_KIND_GAUGE does not support Observe",
        "Failed to get metric value: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value",
        "Failed to create metric. Missing required buckets.",
        "Failed to create metric. Buckets must be a list.",
        "Failed to create metric. Unexpected buckets found.",
        "Error when creating Metric: Bucket Boundaries must be strictly sorted",
        "Error when creating Metric: Bucket Boundaries must be strictly sorted",
        "Error when creating Metric: Invalid label name: 'le'",
        "Failed to create metric. Labels must be a dictionary.",
        "Failed to create metric. Labels must be strings",
        "Error when creating Metric: Invalid label name: 'a b'",
        "Failed to increment metric value: Invalid metric operation as the corresponding 'MetricFamily' has been",
    ]
    seen = run(host, execute)
    assert [text.startswith(start) for text, start in zip(seen, told, strict=True)] == [True] * len(told), seen
    assert "# TYPE c counter\nc 0\n" in page(host)
