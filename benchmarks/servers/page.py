"""The part of docs/benchmarks.md that compares servers, and the data of its picture.

Used by the command line; independent of how anything was measured. Invariants: the overview comes before its details;
every figure is a median of several rounds on one machine, whichever server wins; a load that no round of a server
completed is listed with its reason.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from ..entries import OURS
from ..report import num_rounds
from .contenders import CONTENDERS, KINDS
from .loads import LOADS

Line = dict[str, Any]
BEGIN, END = "<!-- servers -->", "<!-- end of servers -->"
PICTURE = "benchmarks_servers.svg"
NOTES_PATH = Path(__file__).with_name("notes.md")
RESULTS = Path(__file__).with_name("results.jsonl")
OVERVIEW = (
    "Output tokens per second of llmbackend; in bold, its ratio to the fastest other server under the same load (below",
    "1 llmbackend is slower). Latencies, memory, spread and the [method](#how-servers-are-measured) are below.",
    "",
)
COLUMNS = (
    ("output tok/s", "output_tokens_per_s", 1),
    ("TTFT p50", "ttft_p50_ms", 0),
    ("p99", "ttft_p99_ms", 0),
    ("between tokens p50", "itl_p50_ms", 1),
    ("p99", "itl_p99_ms", 1),
    ("errors", "errors", 0),
    ("PSS MB", "pss_mb", 0),
)


def write_section(lines: Sequence[Line], page: Path) -> None:
    """Writes it between its markers, which are added after the title if missing."""
    text = page.read_text()
    if BEGIN not in text:
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n{BEGIN}\n{END}\n{rest}"
    before, _, after = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{section(lines)}{END}{after.partition(END)[2]}")


def section(lines: Sequence[Line]) -> str:
    """The machine that was measured last comes first."""
    lines = _repeated(lines)
    if not lines:
        return ""
    machines = list(dict.fromkeys(line["machine"] for line in sorted(lines, key=lambda line: -line["time"])))
    of_machine = {machine: [line for line in lines if line["machine"] == machine] for machine in machines}
    parts = ["## Servers", "", *OVERVIEW]
    for machine, found in of_machine.items():
        parts += [f"**{machine}**", "", *_ratios(found)]
    parts += [f"![Output tokens per second]({PICTURE})", "", f"The picture shows {_of_picture(lines)}.", ""]
    for machine, found in of_machine.items():
        parts += _machine(found, machine)
    return "\n".join([*parts, NOTES_PATH.read_text().strip()]) + "\n\n"


def _ratios(lines: Sequence[Line]) -> list[str]:
    """A row for a model and its weights, a column for a load that two servers completed."""
    groups: dict[tuple[str, str], dict[str, list[Line]]] = {}
    for line in _good(lines):
        groups.setdefault((line["model"], line["weights"]), {}).setdefault(line["load"], []).append(line)
    rows = {key: {load: _beside_best(found) for load, found in of_row.items()} for key, of_row in groups.items()}
    loads = [load.name for load in LOADS if any(cells.get(load.name) for cells in rows.values())]
    shown = [[*key, *(cells.get(load, "") for load in loads)] for key, cells in rows.items() if any(cells.values())]
    head = ["model", "weights", *loads]
    return [_cells(head), "|---|---|" + "--:|" * len(loads), *map(_cells, shown), ""] if shown else []


def _beside_best(lines: Sequence[Line]) -> str:
    """Empty without a figure of ours and one of another server."""
    speeds = {name: _median_speed(found) for name, found in _by_server(lines).items()}
    ours = speeds.pop(OURS, None)
    if ours is None or not speeds:
        return ""
    best = max(speeds, key=speeds.__getitem__)
    return f"{ours:,.0f}, **{ours / speeds[best]:.2f} ×** {best}"


def _cells(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _repeated(lines: Sequence[Line]) -> list[Line]:
    """What several rounds measured, and the failures beside it: a single round has no spread."""
    rounds = Counter(_figure(line) for line in _good(lines))
    tables = {figure[:3] for figure, count in rounds.items() if count > 1}
    return [line for line in lines if rounds[_figure(line)] != 1 and _figure(line)[:3] in tables]


def _figure(line: Line) -> tuple[str, ...]:
    return tuple(line[key] for key in ("machine", "model", "weights", "load", "server"))


def _good(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if "error" not in line]


def _machine(lines: Sequence[Line], machine: str) -> list[str]:
    measured = _good(lines)
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(line["time"])) for line in measured})
    versions = {f"{name} {line['version']}" for name, ones in _by_server(measured).items() for line in ones}
    how = f"{' and '.join(days)}; medians of {num_rounds(measured)} rounds. {', '.join(sorted(versions))}."
    parts = [f"### {machine}", "", how, ""]
    for model in dict.fromkeys(line["model"] for line in lines):
        for kind in KINDS:
            parts += _table([line for line in lines if (line["model"], line["weights"]) == (model, kind)], model, kind)
    return parts


def _table(lines: Sequence[Line], model: str, kind: str) -> list[str]:
    if not lines:
        return []
    head = _cells(["load", "server", *(title for title, _, _ in COLUMNS), "ready s", "ours is", "spread"])
    rows, reasons = [], []
    for load in LOADS:
        by_server = _by_server([line for line in lines if line["load"] == load.name])
        for name, found in by_server.items():
            if good := _good(found):
                rows.append(_row(load.name, name, good, _good(by_server.get(OURS, []))))
            else:
                reasons.append(f"- {load.name}, {name}: {shorten(found[-1]['error'], 140, placeholder=' …')}")
    table = [head, "|---|---|" + "--:|" * (len(COLUMNS) + 3), *rows, ""] if rows else []
    listed = ["Not measured:", "", *reasons, ""] if reasons else []
    return [f"#### {model}, {kind}", "", *table, *listed]


def _by_server(lines: Sequence[Line]) -> dict[str, list[Line]]:
    names = [one.name for one in CONTENDERS if any(line["server"] == one.name for line in lines)]
    return {name: [line for line in lines if line["server"] == name] for name in names}


def _row(load: str, name: str, found: Sequence[Line], ours: Sequence[Line]) -> str:
    cells = [f"{median(found, key):,.{digits}f}" for _, key, digits in COLUMNS]
    speeds = [line["output_tokens_per_s"] for line in found]
    ratio = "" if name == OURS or not ours else f"{_median_speed(ours) / _median_speed(found):.2f} ×"
    spread = f"{len(speeds)}, {100 * (max(speeds) / min(speeds) - 1):.0f} %"
    shown = f"**{name}**" if name == OURS else name
    return _cells([load, shown, *cells, f"{median(found, 'ready_s'):.1f}", ratio, spread])


def median(lines: Sequence[Line], key: str) -> float:
    return float(statistics.median(line[key] for line in lines))


def _median_speed(lines: Sequence[Line]) -> float:
    return median(lines, "output_tokens_per_s")


def _of_picture(lines: Sequence[Line]) -> str:
    """The machine with the most results."""
    counts = Counter(line["machine"] for line in _good(lines))
    return max(counts, key=counts.__getitem__, default="")


def summary(lines: Sequence[Line]) -> list[Line]:
    """Data of the picture: output tokens per second on one machine."""
    groups: dict[tuple[str, ...], list[float]] = {}
    lines = _repeated(lines)
    machine = _of_picture(lines)
    for line in _good(lines):
        if line["machine"] == machine:
            key = (line["model"], line["weights"], line["load"], line["server"])
            groups.setdefault(key, []).append(line["output_tokens_per_s"])
    names = ("model", "weights", "workload", "engine")
    return [dict(zip(names, key, strict=True)) | {"speed": statistics.median(speeds)} for key, speeds in groups.items()]
