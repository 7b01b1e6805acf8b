"""What must be gone when nothing runs: the host's own law of conservation.

For: model versions (checked each time one becomes idle) and the server (checked when asked). Does not know: what a
count counts. Invariant: a breach is logged and counted once per model version and kind, not once per check.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from .backend_api import MetricFamily, MetricKind
from .metrics.metric_family import MetricFamilies

log = logging.getLogger(__name__)

BREACHES_METRIC = "llmbackend:core_invariant_breaches_total"
BREACHES_DESCRIPTION = "Number of times the host found something left behind by requests that are over"


def breaches_of(subject: str, left: Mapping[str, int]) -> list[str]:
    """One sentence for each count in `left` that is not 0."""
    return [f"{subject} is idle, but has {count} {what}" for what, count in left.items() if count]


class BreachLog:
    """Logs and counts breaches of the idle checks. Any thread. The metric appears with the first of them, so that a
    server without any shows Triton's metrics and no other."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._lock = threading.Lock()
        self._seen: set[tuple[str, int, str]] = set()

    def report(self, model: str, version: int, left: Mapping[str, int]) -> None:
        for what, count in left.items():
            with self._lock:
                is_new = (model, version, what) not in self._seen
                self._seen.add((model, version, what))
            if is_new:
                log.error(
                    "invariant breached: model '%s' version %d is idle, but has %d %s", model, version, count, what
                )
                self._metric().increment(model=model, version=str(version))

    def _metric(self) -> MetricFamily:
        return self._families.get(MetricKind.COUNTER, BREACHES_METRIC, BREACHES_DESCRIPTION, ("model", "version"), None)

    def forget(self, model: str, version: int) -> None:
        """A version that was loaded again starts anew."""
        with self._lock:
            self._seen = {seen for seen in self._seen if seen[:2] != (model, version)}
