"""Services of the host that all model versions share: timer, reaper, response cache, rate limiter …

They start before the first model is loaded and stop after the last one is finalised.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from llmbackend.fork_server.host_policy import HostPolicy
from llmbackend.waiting.timer import Timer

from .activity.hub import ActivityHub
from .backend_api import MetricKind
from .caching import CacheSlot
from .gpus import HostGpus
from .metrics.metric_family import MetricFamilies
from .metrics.metrics_options import MetricsOptions
from .model_to_model import ModelHost
from .requests.response_channel import Reaper
from .scheduling.rate_limiter import RateLimiter
from .server_options import ServerOptions

log = logging.getLogger(__name__)

LEAKS_METRIC = "llmbackend:core_invariant_breaches_total"
LEAKS_DESCRIPTION = "Number of times the host found something left behind by finished requests"


class LeakLog:
    """Logs and counts leaked resources of idle model versions, once per version and kind. Thread-safe. The metric is
    created on the first leak, so that a server without leaks exports only Triton's metrics."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._lock = threading.Lock()
        self._seen: set[tuple[str, int, str]] = set()

    def report(self, model: str, version: int, leaks: Mapping[str, int]) -> None:
        """leaks: count by kind."""
        for what, count in leaks.items():
            with self._lock:
                is_new = (model, version, what) not in self._seen
                self._seen.add((model, version, what))
            if is_new:
                log.error(
                    "invariant violated: model '%s' version %d is idle, but has %d %s", model, version, count, what
                )
                labels = ("model", "version")
                metric = self._families.get(MetricKind.COUNTER, LEAKS_METRIC, LEAKS_DESCRIPTION, labels)
                metric.increment(model=model, version=str(version))

    def forget(self, model: str, version: int) -> None:
        """Called when the version has been unloaded: leaks after another load are reported again."""
        with self._lock:
            self._seen = {seen for seen in self._seen if seen[:2] != (model, version)}


@dataclass(frozen=True, slots=True)
class HostServices:
    reaper: Reaper
    timer: Timer
    leaks: LeakLog
    metrics: MetricsOptions
    host: ModelHost
    caches: CacheSlot
    rate_limiter: RateLimiter
    gpus: HostGpus
    host_policies: Mapping[str, HostPolicy]
    activity: ActivityHub

    @classmethod
    def create(
        cls, options: ServerOptions, host: ModelHost, registry: CollectorRegistry, families: MetricFamilies
    ) -> HostServices:
        """Raises TritonError INVALID_ARG for invalid settings."""
        return cls(
            Reaper(),
            Timer(),
            LeakLog(families),
            options.metrics,
            host,
            CacheSlot(options.cache_config, options.cache_directory, registry, families.get),
            RateLimiter(options.rate_limit, options.rate_limit_resources),
            HostGpus.find(options.backend_config),
            options.host_policies,
            ActivityHub(),
        )

    def start(self) -> None:
        """Raises TritonError if the response cache cannot be created."""
        self.reaper.start()
        self.timer.start()
        self.caches.open()

    def stop(self) -> None:
        self.activity.close()
        self.caches.close()
        self.timer.stop()
        self.reaper.stop()
