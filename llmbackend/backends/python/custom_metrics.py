"""The metrics that models make through pb_utils, on the host's side.

For: stub processes, whose models name metrics by number; one MetricUsers per backend, one ModelMetrics per model
version. Does not know: Prometheus. Invariants: a metric lives as long as a model version that made it, so that an
unloaded model leaves none in /metrics, a restarted instance continues counting and a reload does not start at 0.
Source: Triton's MetricFamily and Metric, which end with the Python objects; a process that was killed cannot end them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from llmbackend.core.backend_api import Backend, MetricFamily, MetricKind, invalid_argument

_Key = tuple[str, tuple[tuple[str, str], ...]]
"""A family's name, and labels, sorted by name."""


class MetricUsers:
    """How many model versions use each metric."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[_Key] = Counter()


class ModelMetrics:
    """Shared by the instances of a model version, of any thread."""

    def __init__(self, backend: Backend, users: MetricUsers) -> None:
        self._backend = backend
        self._users = users
        self._numbers: dict[_Key, int] = {}
        self._metrics: list[tuple[MetricFamily, dict[str, str]]] = []

    def open_family(self, kind: str, name: str, description: str) -> None:
        """Raises TritonError ALREADY_EXISTS when the family is of another kind, INVALID_ARG for its name."""
        self._family(kind, name, description)

    def open(
        self, kind: str, name: str, description: str, labels: dict[str, str], buckets: Sequence[float] | None
    ) -> int:
        """The number of a metric, which is exported from now on. Raises TritonError as `open_family`, and INVALID_ARG
        for labels or buckets that are not valid."""
        family = self._family(kind, name, description)
        key = (name, tuple(sorted(labels.items())))
        with self._users.lock:
            family.declare(buckets, **labels)
            if key not in self._numbers:
                self._users.counts[key] += 1
                self._numbers[key] = len(self._metrics)
                self._metrics.append((family, labels))
            return self._numbers[key]

    def change(self, number: int, action: str, value: float) -> None:
        family, labels = self._metrics[number]
        if action == "increment":
            family.increment(value, **labels)
        elif action == "set":
            family.set(value, **labels)
        elif action == "observe":
            family.observe(value, **labels)
        else:
            raise invalid_argument(f"a metric has no action {action!r}")

    def value(self, number: int) -> float:
        family, labels = self._metrics[number]
        return family.value(**labels)

    def close(self) -> None:
        """Removes the metrics that no other model version uses."""
        with self._users.lock:
            for key, number in self._numbers.items():
                self._users.counts[key] -= 1
                if not self._users.counts[key]:
                    del self._users.counts[key]
                    family, labels = self._metrics[number]
                    family.remove(**labels)
            self._numbers.clear()

    def _family(self, kind: str, name: str, description: str) -> MetricFamily:
        return self._backend.metric_family(MetricKind(kind), name, description, None)
