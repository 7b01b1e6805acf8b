"""Which metrics a server shows, and how: `--metrics-config` and its neighbours.

For: the command line (it parses), models and the collectors of the registry. Does not know: Prometheus. Invariant:
names and defaults are Triton's. Source: Triton's command line and metric_model_reporter.cc.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
FORMAT = "--metrics-config option format is '<setting>=<value>'. Got"


@dataclass(frozen=True, slots=True)
class Quantile:
    """`quantile` of a summary, which may be wrong by `error` (of the requests, not of the value)."""

    quantile: float
    error: float


DEFAULT_QUANTILES = (
    Quantile(0.5, 0.05),
    Quantile(0.9, 0.01),
    Quantile(0.95, 0.001),
    Quantile(0.99, 0.001),
    Quantile(0.999, 0.001),
)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """`interval_ms`: how old the metrics of the machine may be."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[Quantile, ...] = DEFAULT_QUANTILES
    interval_ms: int = 2000
    cpu_metrics: bool = True


def with_metrics_config(options: MetricsOptions, items: Iterable[str]) -> MetricsOptions:
    """`options` with each `<setting>=<value>` applied. Raises ValueError, one line, for one that is not understood.
    (Triton ignores it.)"""
    for item in items:
        setting, equals, value = item.partition("=")
        if not equals or not value:
            raise ValueError(f"{FORMAT} {item}")
        if setting == "summary_quantiles":
            options = replace(options, summary_quantiles=_quantiles(value))
        elif setting == "counter_latencies":
            options = replace(options, counter_latencies=_boolean(item, value))
        elif setting == "histogram_latencies":
            options = replace(options, histogram_latencies=_boolean(item, value))
        elif setting == "summary_latencies":
            options = replace(options, summary_latencies=_boolean(item, value))
        else:
            raise ValueError(
                f"--metrics-config has no setting '{setting}', expected counter_latencies, histogram_latencies, "
                f"summary_latencies or summary_quantiles"
            )
    return options


def _boolean(item: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(f"--metrics-config {item}: expected true or false")
    return value == "true"


def _quantiles(text: str) -> tuple[Quantile, ...]:
    """`<quantile>:<error>`, separated by commas."""
    return tuple(_quantile(pair) for pair in text.strip('"').split(","))


def _quantile(pair: str) -> Quantile:
    quantile, colon, error = pair.partition(":")
    if not colon:
        raise ValueError(f"Invalid option: [{pair}]. No ':' delimiter found. Expected format is <quantile>:<error>")
    try:
        parsed = Quantile(_leading_number(quantile), _leading_number(error))
    except ValueError:
        raise ValueError(f"Invalid option: [{pair}]. Error: not a number") from None
    if not (0 <= parsed.quantile <= 1 and 0 <= parsed.error <= 1) or math.isnan(parsed.error):
        raise ValueError(f"Invalid option: [{pair}]. Error: out of the range [0, 1]")
    return parsed


def _leading_number(text: str) -> float:
    """As Triton's command line reads numbers: what follows a number does not count. Raises ValueError without one."""
    found = _NUMBER.match(text)
    return float(found[0] if found else text)
