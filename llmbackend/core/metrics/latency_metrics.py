"""The latency families that `--metrics-config` switches on, as collectors of the server's registry.

For: metrics.py, which registers them behind every counter and gauge, where Triton prints them. Does not know: how
values are gathered (latencies.py). Invariant: a family without samples is not there, as in Triton.
Source: Triton's metrics.cc; prometheus-cpp's text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from llmbackend.core.models.model import LoadedModel

from .latencies import FIRST_RESPONSE, Summaries, Summary
from .metric_family import number_text
from .metrics_options import MetricsOptions

Models = Callable[[], Iterable[LoadedModel]]
Labels = Callable[[LoadedModel], Mapping[str, str]]

SUMMARIES: tuple[tuple[str, str, Callable[[Summaries], Summary]], ...] = (
    (
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        lambda summaries: summaries.request,
    ),
    (
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        lambda summaries: summaries.queue,
    ),
    (
        "nv_inference_compute_input_summary_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda summaries: summaries.compute_input,
    ),
    (
        "nv_inference_compute_infer_summary_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda summaries: summaries.compute_infer,
    ),
    (
        "nv_inference_compute_output_summary_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda summaries: summaries.compute_output,
    ),
    (
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit duration per model, in microseconds",
        lambda summaries: summaries.cache_hit,
    ),
    (
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss (insert+lookup) duration per model, in microseconds",
        lambda summaries: summaries.cache_miss,
    ),
)
WITHOUT_CACHE = frozenset({"nv_inference_request_summary_us"})
"""A request's duration leaves out the storing of its response, so Triton does not show it for models with a cache."""
WITH_CACHE = frozenset({"nv_cache_hit_summary_per_model", "nv_cache_miss_summary_per_model"})


class FirstResponseMetrics:
    """A collector of the histogram of decoupled models."""

    def __init__(self, models: Models, labels: Labels) -> None:
        self._models = models
        self._labels = labels

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        description = "Duration from request to first response in milliseconds"
        metric = Metric(FIRST_RESPONSE, description, "histogram")
        for model in self._models():
            histogram = model.latencies.first_response
            if histogram is None:
                continue
            labels = dict(self._labels(model))
            counts, total = histogram.snapshot()
            metric.add_sample(f"{FIRST_RESPONSE}_count", labels, sum(counts))
            metric.add_sample(f"{FIRST_RESPONSE}_sum", labels, total)
            for bound, count in zip(histogram.bounds, itertools.accumulate(counts), strict=True):
                metric.add_sample(f"{FIRST_RESPONSE}_bucket", {**labels, "le": number_text(bound)}, count)
        if metric.samples:
            yield metric


class SummaryMetrics:
    """A collector of the summaries of every model."""

    def __init__(self, models: Models, labels: Labels, options: MetricsOptions) -> None:
        self._models = models
        self._labels = labels
        self._quantiles = [quantile.quantile for quantile in options.summary_quantiles]

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        for name, description, read in SUMMARIES:
            metric = Metric(name, description, "summary")
            for model in models:
                hidden = WITHOUT_CACHE if model.statistics.is_cached else WITH_CACHE
                if model.latencies.summaries is not None and name not in hidden:
                    self._add(metric, self._labels(model), read(model.latencies.summaries))
            if metric.samples:
                yield metric

    def _add(self, metric: Metric, labels: Mapping[str, str], summary: Summary) -> None:
        count, total, values = summary.snapshot(self._quantiles)
        metric.add_sample(f"{metric.name}_count", dict(labels), count)
        metric.add_sample(f"{metric.name}_sum", dict(labels), total)
        for quantile, value in zip(self._quantiles, values, strict=True):
            metric.add_sample(metric.name, {**labels, "quantile": number_text(quantile)}, value)
