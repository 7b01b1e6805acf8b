"""Plots the speed of every engine on every workload that a peer ran, too, relative to the fastest peer.

    python plot.py SUMMARY.json PICTURE.svg

For docs/benchmarks.md; runs in an environment with matplotlib. Independent of how the summary was made.
"""

from __future__ import annotations

import json
import sys
import textwrap
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

OURS = "llmbackend"
COLORS = {
    OURS: "#1b7837",
    "vLLM": "#4393c3",
    "OpenVINO GenAI": "#f4a582",
    "llama.cpp": "#b2abd2",
    "transformers CB": "#bababa",
}
TITLES = {"int8": "8-bit weights", "bf16": "bfloat16 checkpoint"}
BAR_WIDTH = 0.16
MOST_IN_A_COLUMN = 3
"""Panels."""
LABEL_CHARACTERS = 15
"""Of a line."""
FEWEST_PLACES = 3
"""Of workloads, so that bars have about the same width in all panels."""


def draw(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    workloads = list(dict.fromkeys(row["workload"] for row in rows if row["engine"] != OURS))
    for place, workload in enumerate(workloads):
        speeds = {row["engine"]: row["speed"] for row in rows if row["workload"] == workload}
        best_peer = max(speed for engine, speed in speeds.items() if engine != OURS)
        engines = [engine for engine in COLORS if engine in speeds]
        for number, engine in enumerate(engines):
            x, height = place + (number - (len(engines) - 1) / 2) * BAR_WIDTH, speeds[engine] / best_peer
            axes.bar(x, height, BAR_WIDTH * 0.92, color=COLORS[engine])
            axes.text(x, height, f"{height:.2f}", ha="center", va="bottom", fontsize=6.5)
    axes.axhline(1.0, color="#666666", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(workloads)), [textwrap.fill(name, LABEL_CHARACTERS) for name in workloads], fontsize=8)
    axes.set_xlim(-0.5, max(len(workloads), FEWEST_PLACES) - 0.5)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=0)


def main() -> None:
    source, target = sys.argv[1:]
    with open(source) as file:
        rows = json.load(file)
    panels = list(dict.fromkeys((row["model"], row["weights"]) for row in rows if row["engine"] != OURS))
    columns = 1 if len(panels) <= MOST_IN_A_COLUMN else 2
    count = -(-len(panels) // columns) or 1
    figure, grid = plt.subplots(count, columns, figsize=(2 + 7 * columns, 2.7 * count), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (model, weights) in zip(grid.flat, panels, strict=False):
        shown = [row for row in rows if (row["model"], row["weights"]) == (model, weights)]
        draw(axes, shown, f"{model}, {TITLES.get(weights, weights)}")
        axes.set_ylabel("speed, best peer = 1", fontsize=8)
    engines = [engine for engine in COLORS if any(row["engine"] == engine for row in rows)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[engine]) for engine in engines]
    figure.legend(handles, engines, loc="upper center", ncols=len(COLORS), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.965))
    figure.savefig(target)


if __name__ == "__main__":
    main()
