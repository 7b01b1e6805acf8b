"""Rendering of metrics: names as the collectors gave them, readable by prometheus_client's own parser."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from llmbackend.frontends.operations.probes import render


class OneFamily:
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def text_of(name: str, kind: str, *samples: tuple[str, dict[str, str], float]) -> str:
    metric = Metric(name, 'What "it"\ncounts', kind)
    for sample in samples:
        metric.add_sample(*sample)
    registry = CollectorRegistry()
    registry.register(OneFamily(metric))
    return render(registry).decode()


def test_counter_keeps_its_name_whether_or_not_it_ends_in_total() -> None:
    for name in ("nv_inference_request_success", "vllm:prompt_tokens_total"):
        text = text_of(name, "counter", (name, {"model": "m"}, 3.0))
        assert text == f'# HELP {name} What "it"\\ncounts\n# TYPE {name} counter\n{name}{{model="m"}} 3\n'


def test_numbers_and_labels() -> None:
    text = text_of("h", "histogram", ("h_bucket", {"le": "+Inf", "b": 'x"\\', "a": "\n"}, 2.0), ("h_sum", {}, 0.25))
    assert 'h_bucket{a="\\n",b="x\\"\\\\",le="+Inf"} 2\nh_sum 0.25\n' in text
    for value, printed in ((float("inf"), "+Inf"), (float("-inf"), "-Inf"), (float("nan"), "NaN"), (1e300, "1e+300")):
        assert text_of("g", "gauge", ("g", {}, value)).endswith(f"g {printed}\n")


def test_a_parser_reads_it_back() -> None:
    text = text_of("g", "gauge", ("g", {"model": 'a "b" \\ c'}, 1.5))
    (family,) = text_string_to_metric_families(text)
    assert (family.type, family.samples[0].labels, family.samples[0].value) == ("gauge", {"model": 'a "b" \\ c'}, 1.5)


def test_counters_of_the_client_library_are_named_after_their_samples() -> None:
    registry = CollectorRegistry()
    Counter("x", "d", registry=registry).inc()
    assert render(registry).decode() == "# HELP x_total d\n# TYPE x_total counter\nx_total 1\n"
