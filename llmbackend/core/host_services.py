"""What the host lends to every model version: a reaper, a timer, a log of breaches, options of metrics, the response
cache, the rate limiter, its GPUs, and itself.

For: the server, which owns them, and model versions. Does not know: models. Invariant: started before the first model
is loaded, stopped after the last one is finalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmbackend.gpus import MIN_COMPUTE_CAPABILITY, supported_gpus
from llmbackend.waiting.timer import Timer

from .caching.cache_slot import CacheSlot
from .conservation import BreachLog
from .errors import invalid_argument
from .inner_door import ModelHost
from .metrics.metrics_options import MetricsOptions
from .requests.reaper import Reaper
from .scheduling.rate_limiter import RateLimiter


@dataclass(frozen=True, slots=True)
class HostGpus:
    """CUDA's ids of the GPUs that instances may be placed on: those with at least that compute capability."""

    ids: tuple[int, ...]
    min_compute_capability: float

    @classmethod
    def find(cls, settings: Mapping[str, Mapping[str, str]]) -> HostGpus:
        """`settings`: ServerOptions.backend_config. Raises TritonError INVALID_ARG for a capability that is no
        number."""
        minimum = settings.get("", {}).get("min-compute-capability", str(MIN_COMPUTE_CAPABILITY))
        try:
            return cls(supported_gpus(float(minimum)), float(minimum))
        except ValueError as error:
            raise invalid_argument(f"the GPUs of this host cannot be told: {error}") from None


@dataclass(frozen=True, slots=True)
class HostServices:
    reaper: Reaper
    timer: Timer
    breaches: BreachLog
    metrics: MetricsOptions
    host: ModelHost
    caches: CacheSlot
    rate_limiter: RateLimiter
    gpus: HostGpus

    def start(self) -> None:
        """Raises TritonError when the response cache can not be made."""
        self.reaper.start()
        self.timer.start()
        self.caches.open()

    def stop(self) -> None:
        self.caches.close()
        self.timer.stop()
        self.reaper.stop()
