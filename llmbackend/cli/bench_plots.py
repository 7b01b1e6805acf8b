"""Plots of a bench, on the terminal and as SVG: latency histograms, throughput over time.

Invariant: every measured value is in a plot; the last bin includes all values beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.text import Text

from .terminal_text import bar, sparkline

_ROWS, _BAR_WIDTH, _BUCKETS = 10, 40, 60
_MOST_DECIMALS: Final = 9
_MOST_PERCENT: Final = 99.0
"""The percentile at which bins end, so that one slow value does not narrow the others."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one run, in seconds since its start: first tokens of the requests, gaps between tokens, all
    tokens."""

    first_tokens_s: Sequence[float]
    gaps_s: Sequence[float]
    tokens_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Bin:
    """Counts low_ms <= value < high_ms; the last bin is open-ended. decimals: with which its limits are shown."""

    low_ms: float
    high_ms: float
    count: int
    is_last: bool = False
    decimals: int = 1

    @property
    def label(self) -> str:
        low, high = (f"{limit:,.{self.decimals}f}" for limit in (self.low_ms, self.high_ms))
        return f"from {low}" if self.is_last else f"{low} – {high}"


def histogram(values_s: Sequence[float], num_bins: int = _ROWS) -> list[Bin]:
    """Bins of equal width; a single one if all values are equal."""
    if not values_s:
        return []
    values_ms = np.asarray(values_s) * 1e3
    low, high = float(values_ms.min()), float(np.percentile(values_ms, _MOST_PERCENT))
    if high <= low:
        return [Bin(low, low, len(values_ms), is_last=True)]
    edges = np.linspace(low, high, num_bins)
    counts, _ = np.histogram(values_ms, np.append(edges, np.inf))
    decimals = _decimals(edges.tolist())
    ends = [*pairwise(edges.tolist()), (float(edges[-1]), float("inf"))]
    return [
        Bin(begin, end, int(count), end == float("inf"), decimals)
        for (begin, end), count in zip(ends, counts, strict=True)
    ]


def _decimals(limits: Sequence[float]) -> int:
    """The smallest number of decimals, at least 1, that keeps all limits distinct."""
    enough = (
        each for each in range(1, _MOST_DECIMALS) if len({f"{limit:.{each}f}" for limit in limits}) == len(limits)
    )
    return next(enough, _MOST_DECIMALS)


def tokens_per_s(tokens_s: Sequence[float], num_buckets: int = _BUCKETS) -> list[float]:
    """Output tokens per second in equal intervals of the run."""
    if not tokens_s:
        return []
    end_s = max(max(tokens_s), 1e-9)
    counts, _ = np.histogram(tokens_s, num_buckets, (0.0, end_s))
    return [float(count) * num_buckets / end_s for count in counts]


def print_plots(measured: Measured, console: Console) -> None:
    rates = tokens_per_s(measured.tokens_s)
    if rates:
        console.print(f"output tokens/s over time, at most {max(rates):,.0f}", style="bold")
        console.print(Text(sparkline(rates), "cyan"))
    for title, values_s in (("time to first token", measured.first_tokens_s), ("between tokens", measured.gaps_s)):
        bins = histogram(values_s)
        if len(bins) < 2:
            continue
        console.print(f"{title}, ms ({len(values_s):,} values)", style="bold")
        most = max(each.count for each in bins)
        for each in bins:
            console.print(Text(f"{each.label:>22} {bar(each.count / most, _BAR_WIDTH, ' ')} {each.count:,}"))


# --- SVG --------------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _MARGIN, _GAP = 760, 200, 60, 50
_STYLE: Final = (
    "text{font:12px sans-serif;fill:#333}.title{font-weight:bold;font-size:14px}.axis{stroke:#999}.bar{fill:#4a7fb5}"
)


def write_svg(measured: Measured, path: Path, title: str) -> None:
    """Raises OSError."""
    panels = [
        _panel("output tokens/s", [(value, "") for value in tokens_per_s(measured.tokens_s)], "time"),
        _panel("time to first token", _bars(measured.first_tokens_s), "ms"),
        _panel("between tokens", _bars(measured.gaps_s), "ms"),
    ]
    height = len(panels) * (_HEIGHT + _GAP) + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="white"/>',
        f'<text class="title" x="{_MARGIN}" y="24">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        lines += [f'<g transform="translate(0 {_GAP + index * (_HEIGHT + _GAP)})">', *panel, "</g>"]
    path.write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def _bars(values_s: Sequence[float]) -> list[tuple[float, str]]:
    return [(each.count, each.label) for each in histogram(values_s, 20)]


def _panel(title: str, bars: Sequence[tuple[float, str]], unit: str) -> Iterator[str]:
    """One plot: bars of equal width, their labels below the first, the middle and the last."""
    most = max((value for value, _ in bars), default=0.0)
    yield f'<text x="{_MARGIN}" y="12">{escape(title)}{f", at most {most:,.0f}" if most else ""}</text>'
    base, room = _HEIGHT - 20, _HEIGHT - 50
    yield f'<line class="axis" x1="{_MARGIN}" y1="{base}" x2="{_WIDTH - 20}" y2="{base}"/>'
    yield f'<text x="{_WIDTH - 20}" y="{base + 16}" text-anchor="end">{escape(unit)}</text>'
    step = (_WIDTH - 20 - _MARGIN) / max(len(bars), 1)
    for index, (value, label) in enumerate(bars):
        height = room * value / most if most else 0.0
        x = _MARGIN + index * step
        tip = f"<title>{escape(f'{label}: ' if label else '')}{value:,.0f}</title>"
        yield (
            f'<rect class="bar" x="{x:.1f}" y="{base - height:.1f}" width="{max(step - 1, 1):.1f}" '
            f'height="{height:.1f}">{tip}</rect>'
        )
        if label and index in (0, len(bars) // 2):
            yield f'<text x="{x:.1f}" y="{base + 16}">{escape(label)}</text>'
