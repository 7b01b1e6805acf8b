"""Metrics of the host that Triton does not have: which model versions are ready, and what the server process uses.

For: the server, which registers them. Does not know: what makes a model ready. Invariant: everything is read at scrape
time, so that a server that is not scraped does no work for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

MODEL_READY = "llmbackend:model_ready"


@dataclass(frozen=True, slots=True)
class VersionReadiness:
    """Whether one model version serves. namespace: "" without namespaces."""

    model: str
    version: int
    namespace: str
    is_ready: bool


Readinesses = Callable[[], Iterable[VersionReadiness]]


def register_host_metrics(registry: CollectorRegistry, readinesses: Readinesses) -> None:
    """The process's metrics have the names of all Prometheus clients: process_cpu_seconds_total,
    process_resident_memory_bytes, process_open_fds …"""
    registry.register(ReadinessMetric(readinesses))
    ProcessCollector(registry=registry)


class ReadinessMetric:
    """A collector: one sample per known model version that was not unloaded."""

    def __init__(self, readinesses: Readinesses) -> None:
        self._readinesses = readinesses

    def collect(self) -> Iterator[Metric]:
        metric = Metric(MODEL_READY, "1: the model version takes requests; 0: it loads, has failed or hangs.", "gauge")
        for each in self._readinesses():
            labels = {"model": each.model, "version": str(each.version)}
            if each.namespace:
                labels["namespace"] = each.namespace
            metric.add_sample(MODEL_READY, labels, float(each.is_ready))
        if metric.samples:
            yield metric
