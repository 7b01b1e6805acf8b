"""The nv_* metrics, as collectors of the server's registry.

For: the server, which registers them. Does not know: HTTP, the text format. Invariants: names are Triton's, with no
suffix added; all four failure reasons are always present; values are read at scrape time from the counters that the
statistics RPC reads, so the two can not disagree. Source: Triton's metrics.cc; golden transcripts 10, 34.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from llmbackend.core.models.model import LoadedModel
from llmbackend.core.statistics import FailureReason, Statistics

from .latency_metrics import FirstResponseMetrics, SummaryMetrics
from .machine_metrics import CpuMetrics, PinnedMemoryMetrics
from .metrics_options import MetricsOptions

Reader = Callable[[Statistics], float | None]
"""None = a model without this metric; a family that no model has is not shown."""


def _microseconds(ns: int) -> float:
    return ns // 1000


MODEL_METRICS: tuple[tuple[str, str, str, Reader], ...] = (
    (
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        lambda statistics: statistics.success.count,
    ),
    (
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        lambda statistics: statistics.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        lambda statistics: statistics.execution_count,
    ),
    (
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda statistics: _microseconds(statistics.success.ns),
    ),
    (
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda statistics: _microseconds(statistics.queue.ns),
    ),
    (
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda statistics: _microseconds(statistics.compute.input_ns),
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda statistics: _microseconds(statistics.compute.infer_ns),
    ),
    (
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda statistics: _microseconds(statistics.compute.output_ns),
    ),
    (
        "nv_cache_num_hits_per_model",
        "counter",
        "Number of cache hits per model",
        lambda statistics: statistics.cache_hit.count if statistics.is_cached else None,
    ),
    (
        "nv_cache_hit_duration_per_model",
        "counter",
        "Total cache hit duration per model, in microseconds",
        lambda statistics: _microseconds(statistics.cache_hit.ns) if statistics.is_cached else None,
    ),
    (
        "nv_cache_num_misses_per_model",
        "counter",
        "Number of cache misses per model",
        lambda statistics: statistics.cache_miss.count if statistics.is_cached else None,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "counter",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda statistics: _microseconds(statistics.cache_miss.ns) if statistics.is_cached else None,
    ),
    (
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda statistics: statistics.pending_count,
    ),
    (
        "nv_model_load_duration_secs",
        "gauge",
        "Model load time in seconds",
        lambda statistics: statistics.load_duration_s,
    ),
)
LATENCY_COUNTERS = frozenset(name for name, *_ in MODEL_METRICS if name.endswith(("_duration_us", "_per_model")))
"""What `--metrics-config counter_latencies=false` switches off."""


def register_metrics(
    registry: CollectorRegistry, models: Callable[[], Iterable[LoadedModel]], options: MetricsOptions
) -> None:
    """The collectors in the order in which Triton prints: counters, gauges, histograms, summaries."""
    registry.register(ModelMetrics(models, options))
    registry.register(PinnedMemoryMetrics())
    if options.cpu_metrics:
        registry.register(CpuMetrics(options))
    if options.histogram_latencies:
        registry.register(FirstResponseMetrics(models, labels_of))
    if options.summary_latencies:
        registry.register(SummaryMetrics(models, labels_of, options))


class ModelMetrics:
    """A collector of one sample per family and serving model version."""

    def __init__(self, models: Callable[[], Iterable[LoadedModel]], options: MetricsOptions) -> None:
        self._models = models
        hidden = () if options.counter_latencies else LATENCY_COUNTERS
        self._metrics = [metric for metric in MODEL_METRICS if metric[0] not in hidden]

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        for name, kind, description, read in self._metrics:
            metric = Metric(name, description, kind)
            for model in models:
                if (value := read(model.statistics)) is not None:
                    metric.add_sample(name, labels_of(model), value)
            if metric.samples:
                yield metric
            if name == "nv_inference_request_success":
                yield _failures(models)


def _failures(models: Iterable[LoadedModel]) -> Metric:
    name = "nv_inference_request_failure"
    metric = Metric(name, "Number of failed inference requests, all batch sizes", "counter")
    for model in models:
        for reason in FailureReason:
            labels = {**labels_of(model), "reason": reason.value}
            metric.add_sample(name, labels, model.statistics.failures[reason])
    return metric


def labels_of(model: LoadedModel) -> dict[str, str]:
    labels = {"model": model.name, "version": str(model.version), **model.metric_tags}
    return labels | {"namespace": model.namespace} if model.namespace else labels
