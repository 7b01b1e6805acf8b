"""The plots of a bench: every measured value is in them, and the SVG is one."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from llmbackend.cli.bench_plots import Measured, histogram, print_plots, tokens_per_s, write_svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("count", [2, 10, 999])
def test_a_histogram_counts_every_value(count: int) -> None:
    draw = random.Random(count)
    values_s = [draw.expovariate(50) for _ in range(count)]
    bins = histogram(values_s)
    assert sum(each.count for each in bins) == count
    assert bins[0].low_ms == pytest.approx(min(values_s) * 1e3)
    for each in bins[:-1]:
        found = sum(each.low_ms <= value * 1e3 < each.high_ms for value in values_s)
        assert abs(found - each.count) <= 1, "rounding at an edge"
    assert [each.is_last for each in bins] == [False] * (len(bins) - 1) + [True]


def test_bins_have_labels_of_their_own() -> None:
    for width_s in (1e-6, 3e-5, 1e-3, 1.0):
        labels = [each.label for each in histogram([0.1 + width_s * step for step in range(20)])]
        assert len(labels) == len(set(labels)) == 10


def test_one_slow_value_does_not_squeeze_the_others() -> None:
    bins = histogram([0.001 * (1 + i % 10) for i in range(1000)] + [60.0])
    assert bins[-1].low_ms <= 11 and len(bins) == 10


def test_nothing_or_one_value() -> None:
    assert histogram([]) == [] and tokens_per_s([]) == []
    [only] = histogram([0.25, 0.25])
    assert (only.low_ms, only.count, only.is_last) == (250.0, 2, True)


def test_rates_add_up_to_the_tokens() -> None:
    draw = random.Random(1)
    tokens_s = [draw.uniform(0, 4) for _ in range(500)]
    rates = tokens_per_s(tokens_s, 20)
    assert sum(rates) * max(tokens_s) / 20 == pytest.approx(500)


def test_the_terminal_and_the_svg_show_the_same_run(tmp_path: Path) -> None:
    draw = random.Random(2)
    measured = Measured(
        [draw.uniform(0.1, 0.9) for _ in range(40)],
        [draw.expovariate(100) for _ in range(400)],
        [draw.uniform(0, 5) for _ in range(440)],
    )
    console = Console(width=100)
    with console.capture() as capture:
        print_plots(measured, console)
    text = capture.get()
    assert "time to first token, ms (40 values)" in text and "between tokens, ms (400 values)" in text
    assert max(map(len, text.splitlines())) <= 100
    write_svg(measured, tmp_path / "plot.svg", "a <workload> & a model")
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert any(text.text == "a <workload> & a model" for text in root.iter(f"{SVG}text"))
    first, ttft, itl = root.iter(f"{SVG}g")
    assert [len(list(panel.iter(f"{SVG}rect"))) for panel in (first, ttft, itl)] == [60, 20, 20]
    counts = [int(str(tip.text).rpartition(": ")[2].replace(",", "")) for tip in ttft.iter(f"{SVG}title")]
    assert sum(counts) == 40
