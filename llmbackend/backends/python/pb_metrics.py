"""`pb_utils.MetricFamily` and its metrics, over the host's metric registry.

For: model code. Does not know: Prometheus. Invariant: the labels of a family's first metric name the labels of all
of them.
Source: Triton python_backend documentation, "Custom Metrics".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn

from llmbackend.core.backend_api import MetricFamily as HostFamily
from llmbackend.core.backend_api import MetricKind

from .current_model import current_model
from .pb_messages import not_built


class Metric:
    """One metric of a family: a family and label values."""

    def __init__(self, family: HostFamily, labels: Mapping[str, str]) -> None:
        self._family = family
        self._labels = {name: str(value) for name, value in labels.items()}

    def increment(self, value: float) -> None:
        self._family.increment(float(value), **self._labels)

    def set(self, value: float) -> None:
        self._family.set(float(value), **self._labels)

    def observe(self, value: float) -> None:
        self._family.observe(float(value), **self._labels)

    def value(self) -> NoReturn:
        raise not_built("Metric.value")


class MetricFamily:
    """`MetricFamily(name, description, kind)`; made inside initialize, execute or finalize."""

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._backend = current_model("MetricFamily").backend
        self._name = name
        self._description = description
        self._kind = MetricKind(kind)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Raises TritonError ALREADY_EXISTS for other label names than the family's; ValueError without buckets."""
        if self._kind is MetricKind.HISTOGRAM and not buckets:
            raise ValueError(f"metric of histogram family '{self._name}' needs buckets")
        names = tuple(labels or ())
        family = self._backend.metric_family(self._kind, self._name, self._description, names, buckets)
        return Metric(family, labels or {})
