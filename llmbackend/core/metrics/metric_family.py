"""Metric families that backends make: counters, gauges and histograms under exactly the names they ask for.

For: Backend.metric_family. Does not know: models, how metrics are served. Invariants: one family per name; a sample's
name is the family's name, with no suffix added (a counter called `x_total` is printed once as `x_total`).
Source: TRITONSERVER_MetricFamily and TRITONSERVER_Metric.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from llmbackend.core.backend_api import MetricKind
from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument

DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LabelValues = tuple[str, ...]


class Family:
    """One family. Owner of its values; any thread may write."""

    def __init__(
        self, kind: MetricKind, name: str, description: str, label_names: tuple[str, ...], buckets: tuple[float, ...]
    ) -> None:
        self.kind = kind
        self.name = name
        self.description = description
        self.label_names = label_names
        self.buckets = buckets
        self._lock = threading.Lock()
        self._values: dict[LabelValues, float] = {}
        self._bucket_counts: dict[LabelValues, list[int]] = {}
        if not label_names and kind is not MetricKind.HISTOGRAM:
            self._values[()] = 0.0

    def increment(self, value: float = 1.0, /, **labels: str) -> None:
        """Adds to a counter or gauge. Raises TritonError INVALID_ARG for a histogram or a counter that would fall."""
        self._check_kind("increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self.kind is MetricKind.COUNTER and value < 0:
            raise invalid_argument(f"counter '{self.name}' can only be incremented monotonically, got {value}")
        key = self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value

    def set(self, value: float, /, **labels: str) -> None:
        self._check_kind("set", MetricKind.GAUGE)
        key = self._key(labels)
        with self._lock:
            self._values[key] = value

    def observe(self, value: float, /, **labels: str) -> None:
        self._check_kind("observe", MetricKind.HISTOGRAM)
        key = self._key(labels)
        with self._lock:
            counts = self._bucket_counts.setdefault(key, [0] * (len(self.buckets) + 1))
            counts[bisect.bisect_left(self.buckets, value)] += 1
            self._values[key] = self._values.get(key, 0.0) + value

    def value(self, **labels: str) -> float:
        """Of a counter or gauge; 0 where nothing was written yet. Raises TritonError INVALID_ARG for a histogram."""
        self._check_kind("read", MetricKind.COUNTER, MetricKind.GAUGE)
        key = self._key(labels)
        with self._lock:
            return self._values.get(key, 0.0)

    def remove(self, **labels: str) -> None:
        key = self._key(labels)
        with self._lock:
            self._values.pop(key, None)
            self._bucket_counts.pop(key, None)

    def collect(self) -> Metric:
        """The family as prometheus_client sees one."""
        metric = Metric(self.name, self.description, self.kind.value)
        with self._lock:
            for key, value in self._values.items():
                labels = dict(zip(self.label_names, key, strict=True))
                if self.kind is not MetricKind.HISTOGRAM:
                    metric.add_sample(self.name, labels, value)
                    continue
                counts = self._bucket_counts[key]
                metric.add_sample(f"{self.name}_count", labels, sum(counts))
                metric.add_sample(f"{self.name}_sum", labels, value)
                bounds = (*self.buckets, float("inf"))
                for bound, total in zip(bounds, itertools.accumulate(counts), strict=True):
                    metric.add_sample(f"{self.name}_bucket", {**labels, "le": number_text(bound)}, total)
        return metric

    def _key(self, labels: dict[str, str]) -> LabelValues:
        if len(labels) != len(self.label_names) or any(name not in labels for name in self.label_names):
            raise invalid_argument(f"metric '{self.name}' has labels {list(self.label_names)}, got {sorted(labels)}")
        return tuple(str(labels[name]) for name in self.label_names)

    def _check_kind(self, action: str, *kinds: MetricKind) -> None:
        if self.kind not in kinds:
            raise invalid_argument(f"metric '{self.name}' is a {self.kind.value}: can not {action} it")


def number_text(value: float) -> str:
    """A sample's value as Triton prints it: whole numbers without a fraction."""
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


class MetricFamilies:
    """Every family that a backend made, by name; a collector of the server's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, Family] = {}
        registry.register(self)

    def get(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: tuple[str, ...],
        buckets: Sequence[float] | None,
    ) -> Family:
        """Raises TritonError ALREADY_EXISTS when the name is taken by another kind, description or label names."""
        with self._lock:
            family = self._families.get(name)
            if family is None:
                bounds = tuple(sorted(buckets)) if buckets else DEFAULT_BUCKETS
                family = Family(kind, name, description, label_names, bounds)
                self._families[name] = family
            elif (family.kind, family.description, family.label_names) != (kind, description, label_names):
                raise TritonError(
                    f"metric family '{name}' already exists as a {family.kind.value} with labels "
                    f"{list(family.label_names)} and description '{family.description}'",
                    ErrorCode.ALREADY_EXISTS,
                )
            return family

    def samples(self, name: str) -> list[Sample]:
        """What the family of that name holds now; [] when there is none."""
        with self._lock:
            family = self._families.get(name)
        return family.collect().samples if family is not None else []

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            families = list(self._families.values())
        for family in families:
            yield family.collect()
