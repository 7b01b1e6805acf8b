"""What the host lends to every model version: a reaper, a timer, a log of breaches, options of metrics, the response
cache, the rate limiter, and itself.

For: the server, which owns them, and model versions. Does not know: models. Invariant: started before the first model
is loaded, stopped after the last one is finalised.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmbackend.waiting.timer import Timer

from .caching.cache_slot import CacheSlot
from .conservation import BreachLog
from .inner_door import ModelHost
from .metrics.metrics_options import MetricsOptions
from .requests.reaper import Reaper
from .scheduling.rate_limiter import RateLimiter


@dataclass(frozen=True, slots=True)
class HostServices:
    reaper: Reaper
    timer: Timer
    breaches: BreachLog
    metrics: MetricsOptions
    host: ModelHost
    caches: CacheSlot
    rate_limiter: RateLimiter

    def start(self) -> None:
        """Raises TritonError when the response cache can not be made."""
        self.reaper.start()
        self.timer.start()
        self.caches.open()

    def stop(self) -> None:
        self.caches.close()
        self.timer.stop()
        self.reaper.stop()
