"""Prometheus' text format, with family names exactly as the collectors gave them.

For: the metrics port. Does not know: what is counted. Invariant: the name on HELP and TYPE is the name of the family's
samples, so that a scraper knows their type. (prometheus_client's own renderer appends `_total` to the HELP and TYPE of
every counter, also to those that Triton prints without it, like nv_inference_request_success.)
Source: Prometheus exposition format 0.0.4; whole numbers without a fraction, as Triton prints them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

_TYPES = frozenset({"counter", "gauge", "histogram", "summary"})


def render(registry: CollectorRegistry) -> bytes:
    lines: list[str] = []
    for metric in registry.collect():
        name = _family_name(metric)
        kind = metric.type if metric.type in _TYPES else "untyped"
        lines.append(f"# HELP {name} {_escape(metric.documentation)}")
        lines.append(f"# TYPE {name} {kind}")
        for sample in metric.samples:
            if not sample.name.endswith("_created"):
                lines.append(f"{sample.name}{_labels(sample.labels)} {_number(float(sample.value))}")
    return ("\n".join(lines) + "\n").encode()


def _family_name(metric: Metric) -> str:
    """prometheus_client's own Counter objects are called `x` and their samples `x_total`."""
    total = f"{metric.name}_total"
    is_client_counter = metric.type == "counter" and any(sample.name == total for sample in metric.samples)
    return total if is_client_counter else metric.name


def _labels(labels: Mapping[str, str]) -> str:
    """Sorted by name, but a bucket's bound or a quantile last."""
    if not labels:
        return ""
    names = sorted(labels, key=lambda name: (name in ("le", "quantile"), name))
    pairs = ",".join(f'{name}="{_escape(labels[name], quote=True)}"' for name in names)
    return f"{{{pairs}}}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _escape(text: str, quote: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quote else escaped
