"""The metrics that a backend may make: kinds, and one family as it sees it.

For: backends, through `core.backend_api`, and the host, which implements families. Does not know: how metrics are
collected or printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricFamily(Protocol):
    """One Prometheus family. Source: TRITONSERVER_MetricFamily and TRITONSERVER_Metric."""

    def declare(self, buckets: Sequence[float] | None = None, /, **labels: str) -> None:
        """Creates the metric with these labels at 0, unless it exists.

        buckets: a histogram's upper bounds, ascending, instead of its family's. Raises TritonError INVALID_ARG for
        invalid labels or buckets.
        """

    def increment(self, value: float = 1.0, /, **labels: str) -> None: ...
    def set(self, value: float, /, **labels: str) -> None: ...
    def observe(self, value: float, /, **labels: str) -> None: ...
    def observe_all(self, values: Sequence[float], /, **labels: str) -> None:
        """As `observe` for each of them, in one call."""

    def value(self, /, **labels: str) -> float:
        """The current value of a counter or gauge."""

    def remove(self, /, **labels: str) -> None:
        """Removes the metric with exactly these labels, if it exists."""
