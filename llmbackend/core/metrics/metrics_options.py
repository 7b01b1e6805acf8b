"""Which metrics are exported, and how: `--metrics-config`, `--metrics-interval-ms`, `--allow-cpu-metrics`.

Names and defaults are Triton's. Source: Triton's command line and metric_model_reporter.cc.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
FORMAT = "--metrics-config option format is '<setting>=<value>'. Got"


@dataclass(frozen=True, slots=True)
class Quantile:
    """One quantile of a summary (0 to 1) and the allowed error of its rank (0 to 1)."""

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
    """Options of the metrics page.

    counter_latencies: show the counters of durations
    histogram_latencies: show the histogram of the time to the first response
    summary_latencies: show summaries of durations
    interval_ms: greatest age of the machine's metrics
    cpu_metrics: show the machine's CPU and memory use
    """

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[Quantile, ...] = DEFAULT_QUANTILES
    interval_ms: int = 2000
    cpu_metrics: bool = True


def with_metrics_config(options: MetricsOptions, items: Iterable[str]) -> MetricsOptions:
    """`options` with each `<setting>=<value>` applied. Raises ValueError with a one-line text for unknown settings and
    values, which Triton ignores."""
    for item in items:
        setting, equals, value = item.partition("=")
        if not equals or not value:
            raise ValueError(f"{FORMAT} {item}")
        if setting == "summary_quantiles":
            options = replace(options, summary_quantiles=_quantiles(value))
        elif setting in ("counter_latencies", "histogram_latencies", "summary_latencies"):
            change: dict[str, Any] = {setting: _boolean(item, value)}
            options = replace(options, **change)
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
    """The number at the beginning of `text`, parsed as by Triton's command line. Raises ValueError if there is none."""
    found = _NUMBER.match(text)
    return float(found[0] if found else text)
