"""`pb_utils.MetricFamily` and its metrics, over the host's metric registry.

For: model code, from any thread. Does not know: Prometheus. Invariants: the labels of a family's first metric name the
labels of all of them; what a model counts before it answers is counted when the answer arrives, though no call but
`Metric` and `value` waits for the host.
Source: Triton python_backend documentation, "Custom Metrics".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from .errors import TritonModelException
from .host_link import host

_COUNTER, _GAUGE, _HISTOGRAM = "counter", "gauge", "histogram"
_KINDS_OF_ACTION = {"increment": (_COUNTER, _GAUGE), "set": (_GAUGE,), "observe": (_HISTOGRAM,)}


class Metric:
    """One metric of a family: a family and label values."""

    def __init__(self, family_name: str, kind: str, number: int) -> None:
        self._family_name = family_name
        self._kind = kind
        self._number = number

    def increment(self, value: float) -> None:
        """Raises TritonModelException for a histogram, or a counter that would fall."""
        if self._kind == _COUNTER and value < 0:
            raise TritonModelException(
                f"counter '{self._family_name}' can only be incremented monotonically, got {value}"
            )
        self._do("increment", value)

    def set(self, value: float) -> None:
        self._do("set", value)

    def observe(self, value: float) -> None:
        self._do("observe", value)

    def value(self) -> float:
        """Of a counter or gauge. Raises TritonModelException for a histogram."""
        if self._kind == _HISTOGRAM:
            raise TritonModelException(f"metric '{self._family_name}' is a histogram, which has no single value")
        return float(host("Metric.value").ask("metric_value", self._number))

    def _do(self, action: str, value: float) -> None:
        if self._kind not in _KINDS_OF_ACTION[action]:
            raise TritonModelException(f"metric '{self._family_name}' is a {self._kind}: can not {action} it")
        host(f"Metric.{action}").post(("metric", self._number, action, float(value)))


class MetricFamily:
    """`MetricFamily(name, description, kind)`."""

    COUNTER: ClassVar[str] = _COUNTER
    GAUGE: ClassVar[str] = _GAUGE
    HISTOGRAM: ClassVar[str] = _HISTOGRAM

    def __init__(self, name: str, description: str, kind: str) -> None:
        if kind not in (_COUNTER, _GAUGE, _HISTOGRAM):
            raise TritonModelException(
                f"Unknown metric kind {kind!r}: expected MetricFamily.COUNTER, GAUGE or HISTOGRAM"
            )
        self._link = host("MetricFamily")
        self._name = str(name)
        self._description = str(description)
        self._kind = str(kind)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Raises TritonModelException for other label names, or another kind or description, than the family's, and
        for a histogram without buckets."""
        if self._kind == _HISTOGRAM and not buckets:
            raise TritonModelException(f"metric of histogram family '{self._name}' needs buckets")
        plain_labels = {str(name): str(value) for name, value in (labels or {}).items()}
        bounds = [float(bound) for bound in buckets] if buckets else None
        number = self._link.ask("metric_open", self._kind, self._name, self._description, plain_labels, bounds)
        return Metric(self._name, self._kind, number)
