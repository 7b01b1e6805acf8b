"""`pb_utils.MetricFamily` and its metrics, over the host's metric registry.

For: model code, from any thread. Does not know: Prometheus. Invariants: a metric is exported from when it is made, at 0
at first; what a model counts before it answers is counted when the answer arrives, though only making and `value` wait
for the host; a metric whose family's object is gone is refused, as in Triton.
Source: Triton python_backend documentation, "Custom Metrics"; the texts of its MetricFamily and Metric.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from .arguments import text
from .errors import TritonModelException
from .host_link import host

_COUNTER, _GAUGE, _HISTOGRAM = "counter", "gauge", "histogram"
_KINDS_OF_ACTION = {
    "increment": (_COUNTER, _GAUGE),
    "set": (_GAUGE,),
    "observe": (_HISTOGRAM,),
    "value": (_COUNTER, _GAUGE),
}


class Metric:
    """One metric of a family: a family and label values."""

    def __init__(self, family: MetricFamily, number: int) -> None:
        self._family = weakref.ref(family)
        self._kind = family._kind
        self._number = number

    def increment(self, value: float) -> None:
        """Raises TritonModelException for a histogram, or a counter that would fall."""
        with _failing("Failed to increment metric value"):
            self._check("increment")
            if self._kind == _COUNTER and value < 0:
                raise TritonModelException(
                    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
                )
            self._post("increment", value)

    def set(self, value: float) -> None:
        with _failing("Failed to set metric value"):
            self._check("set")
            self._post("set", value)

    def observe(self, value: float) -> None:
        with _failing("Failed to observe metric value"):
            self._check("observe")
            self._post("observe", value)

    def value(self) -> float:
        """Of a counter or gauge. Raises TritonModelException for a histogram."""
        with _failing("Failed to get metric value"):
            self._check("value")
            return float(host("Metric.value").ask("metric_value", self._number))

    def _check(self, action: str) -> None:
        if self._family() is None:
            raise TritonModelException(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' "
                "object should be deleted AFTER its corresponding 'Metric' objects have been deleted."
            )
        if self._kind not in _KINDS_OF_ACTION[action]:
            raise TritonModelException(
                f"TRITONSERVER_METRIC_KIND_{self._kind.upper()} does not support {action.capitalize()}"
            )

    def _post(self, action: str, value: float) -> None:
        host(f"Metric.{action}").post(("metric", self._number, action, float(value)))


class MetricFamily:
    """`MetricFamily(name, description, kind)`. A family that is there already keeps its first description."""

    COUNTER: ClassVar[str] = _COUNTER
    GAUGE: ClassVar[str] = _GAUGE
    HISTOGRAM: ClassVar[str] = _HISTOGRAM

    def __init__(self, name: str | bytes, description: str | bytes, kind: str) -> None:
        """Raises TritonModelException when the name is taken by another kind, or is no name of a metric."""
        if kind not in (_COUNTER, _GAUGE, _HISTOGRAM):
            raise TritonModelException(
                f"Unknown metric kind {kind!r}: expected MetricFamily.COUNTER, GAUGE or HISTOGRAM"
            )
        self._link = host("MetricFamily")
        self._name = text(name, "name")
        self._description = text(description, "description")
        self._kind = str(kind)
        with _failing("Error when creating MetricFamily"):
            self._link.ask("metric_family", self._kind, self._name, self._description)

    def Metric(self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """The metric with these labels; the same one each time. `buckets`: a histogram's upper bounds, ascending.

        Raises TritonModelException for labels or buckets that can not be.
        """
        bounds = self._checked_buckets(buckets)
        plain_labels = _checked_labels(labels)
        with _failing("Error when creating Metric"):
            number = self._link.ask("metric_open", self._kind, self._name, self._description, plain_labels, bounds)
        return Metric(self, number)

    def _checked_buckets(self, buckets: Any) -> list[float] | None:
        if buckets is None:
            if self._kind == _HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
            return None
        if not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind != _HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        return [float(bound) for bound in buckets]


def _checked_labels(labels: Any) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TritonModelException(f"Failed to create metric. Labels must be strings, got {{{name!r}: {value!r}}}.")
    return {str(name): str(value) for name, value in labels.items()}


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Puts `what` before the text of a refusal."""
    try:
        yield
    except TritonModelException as error:
        raise TritonModelException(f"{what}: {error}") from None
