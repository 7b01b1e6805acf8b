"""Metric families of backends: counters, gauges and histograms under exactly the requested names.

Invariants: each name has one family with one kind and its first description; every name and label is valid in
Prometheus's format, because a single invalid one would invalidate the whole page; names get no suffix (a counter
`x_total` is printed as `x_total`). Source: TRITONSERVER_MetricFamily and TRITONSERVER_Metric; the texts of
prometheus-cpp, which Triton passes on.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import threading
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from ..backend_api import MetricKind
from ..errors import ErrorCode, TritonError, invalid_argument

DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LabelSet = tuple[tuple[str, str], ...]
"""Names and values, sorted by name."""
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Family:
    """metric_api.MetricFamily, and the samples of its metrics. Thread-safe."""

    def __init__(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: tuple[str, ...] | None,
        buckets: tuple[float, ...],
    ) -> None:
        """label_names: labels of all metrics in the family; None = each metric has its own."""
        self.kind = kind
        self.name = name
        self.description = description
        self.label_names = label_names
        self.buckets = buckets
        self._lock = threading.Lock()
        self._values: dict[LabelSet, float] = {}
        self._buckets: dict[LabelSet, tuple[float, ...]] = {}
        self._bucket_counts: dict[LabelSet, list[int]] = {}
        if label_names == () and kind is not MetricKind.HISTOGRAM:
            self._values[()] = 0.0

    def declare(self, buckets: Sequence[float] | None = None, /, **labels: str) -> None:
        bounds = self.buckets if buckets is None else _checked_bounds(buckets)
        key = self._key(labels)
        _check_labels(self.name, self.kind, labels)
        with self._lock:
            self._add(key, bounds)

    def increment(self, value: float = 1.0, /, **labels: str) -> None:
        """Raises TritonError INVALID_ARG for a histogram, and for a counter with a negative value."""
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
        self.observe_all((value,), **labels)

    def observe_all(self, values: Sequence[float], /, **labels: str) -> None:
        self._check_kind("observe", MetricKind.HISTOGRAM)
        key = self._key(labels)
        with self._lock:
            self._add(key, self.buckets)
            bounds, counts = self._buckets[key], self._bucket_counts[key]
            for value in values:
                counts[bisect.bisect_left(bounds, value)] += 1
            self._values[key] += sum(values)

    def value(self, /, **labels: str) -> float:
        """0 if never written. Raises TritonError INVALID_ARG for a histogram."""
        self._check_kind("read", MetricKind.COUNTER, MetricKind.GAUGE)
        key = self._key(labels)
        with self._lock:
            return self._values.get(key, 0.0)

    def remove(self, /, **labels: str) -> None:
        key = self._key(labels)
        with self._lock:
            self._values.pop(key, None)
            self._buckets.pop(key, None)
            self._bucket_counts.pop(key, None)

    def collect(self) -> Metric:
        metric = Metric(self.name, self.description, self.kind.value)
        with self._lock:
            for key, value in self._values.items():
                labels = dict(key)
                if self.kind is not MetricKind.HISTOGRAM:
                    metric.add_sample(self.name, labels, value)
                    continue
                counts = self._bucket_counts[key]
                metric.add_sample(f"{self.name}_count", labels, sum(counts))
                metric.add_sample(f"{self.name}_sum", labels, value)
                bounds = (*self._buckets[key], float("inf"))
                for bound, total in zip(bounds, itertools.accumulate(counts), strict=True):
                    metric.add_sample(f"{self.name}_bucket", {**labels, "le": number_text(bound)}, total)
        return metric

    def _add(self, key: LabelSet, bounds: tuple[float, ...]) -> None:
        """The caller holds the lock."""
        if key not in self._values:
            self._values[key] = 0.0
            if self.kind is MetricKind.HISTOGRAM:
                self._buckets[key] = bounds
                self._bucket_counts[key] = [0] * (len(bounds) + 1)

    def _key(self, labels: dict[str, str]) -> LabelSet:
        key = tuple(labels.items())
        if key in self._values:  # checked when first written
            return key
        names = self.label_names
        if names is not None and (len(labels) != len(names) or any(name not in labels for name in names)):
            raise invalid_argument(f"metric '{self.name}' has labels {list(names)}, got {sorted(labels)}")
        return tuple(sorted((name, str(value)) for name, value in labels.items()))

    def _check_kind(self, action: str, *kinds: MetricKind) -> None:
        if self.kind not in kinds:
            raise invalid_argument(f"metric '{self.name}' is a {self.kind.value}: cannot {action} it")


def _check_labels(metric: str, kind: MetricKind, names: Iterable[str]) -> None:
    for name in names:
        if not _LABEL_NAME.fullmatch(name) or (name == "le" and kind is MetricKind.HISTOGRAM):
            raise invalid_argument(f"Invalid label name: '{name}' of metric '{metric}'")


def _checked_bounds(buckets: Sequence[float]) -> tuple[float, ...]:
    bounds = tuple(map(float, buckets))
    if any(map(math.isnan, bounds)) or any(lower >= upper for lower, upper in itertools.pairwise(bounds)):
        raise invalid_argument(f"Bucket Boundaries must be strictly sorted, got {list(bounds)}")
    return bounds[:-1] if bounds and bounds[-1] == math.inf else bounds  # every histogram has this bucket


def number_text(value: float) -> str:
    """A number as Triton prints it: whole numbers without a fraction."""
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


class MetricFamilies:
    """All metric families of backends, by name; a collector of the server's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, Family] = {}
        registry.register(self)

    def get(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str] | None = (),
        buckets: Sequence[float] | None = None,
    ) -> Family:
        """See Backend.metric_family. Raises TritonError INVALID_ARG also for names and buckets that Prometheus does not
        allow."""
        if not _METRIC_NAME.fullmatch(name):
            raise invalid_argument(f"Invalid metric name: '{name}'")
        labels = None if label_names is None else tuple(label_names)
        _check_labels(name, kind, labels or ())
        with self._lock:
            family = self._families.get(name)
            if family is None:
                bounds = _checked_bounds(sorted(buckets)) if buckets else DEFAULT_BUCKETS
                family = Family(kind, name, description, labels, bounds)
                self._families[name] = family
            elif family.kind is not kind:
                raise TritonError(
                    f"Family name already exists with different type: '{name}' is a {family.kind.value}",
                    ErrorCode.ALREADY_EXISTS,
                )
            elif labels is None:
                family.label_names = None
            elif family.label_names not in (None, labels):
                raise TritonError(
                    f"metric family '{name}' already exists with labels {list(family.label_names or ())}",
                    ErrorCode.ALREADY_EXISTS,
                )
            return family

    def samples(self, name: str) -> list[Sample]:
        """The current samples of a family; [] for an unknown one."""
        with self._lock:
            family = self._families.get(name)
        return family.collect().samples if family is not None else []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            families = list(self._families.values())
        for family in families:
            collected = family.collect()
            if collected.samples or family.label_names is not None:
                yield collected
