"""Writes docs/benchmarks.md from measurements: medians over rounds, fastest forms, ratios to the fastest peer.

Used by `python -m benchmarks`; independent of how anything was measured. Invariants: every figure is a median of the
rounds on one machine; failures are listed, not omitted; the page depends on the results file alone.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .entries import ENTRIES, OURS, Entry
from .workloads import DESCRIPTIONS, LONG, PREFILL

Line = dict[str, Any]
BIG_FOREIGN_LOAD_CORES = 0.15
NOTES_PATH = Path(__file__).with_name("notes.md")
_WEIGHTS_TITLES = {
    "bf16": "bfloat16 checkpoint",
    "int8": "8-bit weights",
    "q4_0": "Q4_0 file; OpenVINO int4",
    "q4_k_m": "Q4_K_M file",
}
_COLUMNS = (
    ("output tok/s", "output_tokens_per_s", 1),
    ("all tok/s", "total_tokens_per_s", 0),
    ("ms per token", "itl_mean_ms", 1),
    ("TTFT p50", "ttft_p50_ms", 0),
    ("TTFT p99", "ttft_p99_ms", 0),
    ("ITL p50", "itl_p50_ms", 1),
    ("ITL p99", "itl_p99_ms", 1),
    ("peak MB", "peak_rss_mb", 0),
    ("PSS MB", "pss_mb", 0),
    ("load s", "load_s", 1),
)
COLD, WARM = "start cold", "start warm"
START_NOTE = (
    "From the command to ready, or to the first token of a short request. Cold: the weight cache is empty and the "
    "checkpoint is not in the page cache; warm: the next start. For llmbackend it is the whole server with its HTTP "
    "and gRPC ports, for a peer the engine alone. Restart: from a SIGKILL of the engine's process during a stream to "
    "that stream's next token. Memory is PSS after the ready line and one request, of all processes at that moment."
)
PERPLEXITY = "perplexity"
FILE_PERPLEXITY = "perplexity of files"
BANDWIDTH = "read bandwidth"
_NOT_OF_ENGINES = (PERPLEXITY, FILE_PERPLEXITY, BANDWIDTH)


def speed(workload: str, figures: Line) -> float:
    """The figure that is compared, higher is better: tokens/s of outputs, or of all where the prompts are most of the
    work (W4, W6, W7, W9, W10); for W3 without prefill."""
    if workload in PREFILL | LONG:
        return float(figures["total_tokens_per_s"])
    if workload == "W3":
        return 1e3 / float(figures["itl_mean_ms"])
    return float(figures["output_tokens_per_s"])


def medians(lines: Iterable[Line], model: str, workload: str) -> dict[str, Line]:
    """Figures by entry."""
    of_entry: dict[str, list[Line]] = {}
    for line in lines:
        if line["model"] == model and line["workload"] == workload and "error" not in line:
            of_entry.setdefault(line["entry"], []).append(line)
    return {entry: _median(rounds) for entry, rounds in of_entry.items()}


def _median(rounds: list[Line]) -> Line:
    numbers = {key for key, value in rounds[0].items() if isinstance(value, int | float)}
    common = [key for key in numbers if all(key in line for line in rounds)]
    figures: Line = {key: statistics.median(line[key] for line in rounds) for key in common}
    walls = [line["wall_s"] for line in rounds]
    spread = (max(walls) - min(walls)) / statistics.median(walls)
    return figures | {"rounds": len(rounds), "spread": spread, "description": rounds[0].get("description", "")}


def best_entries(lines: list[Line], model: str, workload: str) -> dict[tuple[str, str], str]:
    """The name of the fastest entry of each (engine, weights)."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for name, figures in medians(lines, model, workload).items():
        entry = ENTRIES[name]
        key = (entry.engine, entry.weights)
        best[key] = max(best.get(key, (0.0, "")), (speed(workload, figures), name))
    return {key: name for key, (_, name) in best.items()}


def best_by_engine(lines: list[Line], model: str, workload: str, weights: str) -> dict[str, tuple[str, Line]]:
    """The fastest entry of each engine, and its figures."""
    figures = medians(lines, model, workload)
    best = best_entries(lines, model, workload)
    return {engine: (name, figures[name]) for (engine, of_weights), name in best.items() if of_weights == weights}


def ratio_to_best_peer(lines: list[Line], model: str, workload: str, weights: str) -> tuple[float, str] | None:
    """Our speed divided by that of the fastest peer, and its name."""
    speeds = {
        engine: speed(workload, figures)
        for engine, (_, figures) in best_by_engine(lines, model, workload, weights).items()
    }
    ours = speeds.pop(OURS, None)
    if ours is None or not speeds:
        return None
    peer = max(speeds, key=lambda engine: speeds[engine])
    return ours / speeds[peer], peer


def write_report(lines: list[Line], path: Path, plot_name: str) -> None:
    parts = [_head(lines), ratios(lines), perplexity_table(lines)]
    if (path.parent / plot_name).exists():
        parts.append(f"![Speed against each peer]({plot_name})\n")
    parts += [tables(lines), NOTES_PATH.read_text()]
    path.write_text("\n".join(part for part in parts if part))


def tables(lines: list[Line]) -> str:
    """The tables of each model, and failures."""
    parts: list[str] = []
    for model in models_of(lines):
        parts += [_offline_tables(lines, model), _start_table(lines, model)]
    if any(line["workload"] in (COLD, WARM) for line in lines):
        parts.append(f"**Start and memory.** {START_NOTE}\n")
    return "\n".join(part for part in [*parts, _failures(lines)] if part)


def models_of(lines: list[Line]) -> list[str]:
    """Models that engines ran."""
    return list(dict.fromkeys(line["model"] for line in lines if line["workload"] not in _NOT_OF_ENGINES))


def summary(lines: list[Line]) -> list[Line]:
    """Data of the plot: the speed of each engine's best entry."""
    found = []
    for model in dict.fromkeys(line["model"] for line in lines):
        for workload in DESCRIPTIONS:
            figures = medians(lines, model, workload)
            for (engine, weights), name in best_entries(lines, model, workload).items():
                value = speed(workload, figures[name])
                found.append(
                    {"model": model, "workload": workload, "engine": engine, "weights": weights, "speed": value}
                )
    return found


def num_rounds(lines: Iterable[Line]) -> int:
    return 1 + max((line["round"] for line in lines), default=0)


def last_day(lines: Iterable[Line]) -> str:
    """Of the measurements; today without any."""
    last_s = max((line["time"] for line in lines if "time" in line), default=time.time())
    return time.strftime("%Y-%m-%d", time.gmtime(last_s))


def _head(lines: list[Line]) -> str:
    return f"""# Benchmarks

## Engines

The engine and its peers on one machine, with the same checkpoints and requests, alternating within one run:
`make bench` ([method](#method)). Medians of the rounds in the last column; greedy, end of sequence ignored, all
requests at once. Machine: {measured_on(lines)}, {last_day(lines)}.

Each engine is shown in its fastest form for the workload: the bfloat16 checkpoint computed in bfloat16 or float32,
whichever is faster here, or 8-bit weights.
"""


@cache
def machine() -> str:
    """This one."""
    return f"{_processor()}, {os.cpu_count()} cores"


def of_newest_machine(lines: Sequence[Line]) -> list[Line]:
    """The lines of the machine that was measured last: figures of several machines have no common median."""
    newest = measured_on(lines)
    return [line for line in lines if line.get("machine", newest) == newest]


def measured_on(lines: Sequence[Line]) -> str:
    """The machine of the last line."""
    return str(lines[-1].get("machine", machine())) if lines else machine()


def _processor() -> str:
    """Its family and model too: virtual machines often name the vendor alone."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""

    def of(key: str) -> str:
        found = re.search(rf"^{key}\s*:(.*)$", text, re.MULTILINE)
        return found[1].strip() if found else ""

    if not (name := of("model name")):
        return platform.processor()
    flags = set(of("flags").split())
    sets = {
        "avx2": "AVX2",
        "avx512f": "AVX-512",
        "avx512_vnni": "VNNI",
        "avx512_bf16": "AVX-512 BF16",
        "amx_tile": "AMX",
    }
    found = ", ".join(title for flag, title in sets.items() if flag in flags)
    return f"{name} (family {of('cpu family')}, model {of('model')}; {found})"


def ratios(lines: list[Line]) -> str:
    rows = ["## Speed relative to the fastest peer", "", "Above 1, llmbackend is faster.", ""]
    workloads = [name for name in DESCRIPTIONS if any(line["workload"] == name for line in lines)]
    rows += ["| model | weights | " + " | ".join(workloads) + " |", "|---|---|" + "---|" * len(workloads)]
    for model in models_of(lines):
        for weights, title in _WEIGHTS_TITLES.items():
            found = [ratio_to_best_peer(lines, model, workload, weights) for workload in workloads]
            if any(found):
                cells = [f"**{ratio[0]:.2f}** ({ratio[1]})" if ratio else "–" for ratio in found]
                rows.append(f"| {model} | {title} | {' | '.join(cells)} |")
    texts = [f"{name}: {DESCRIPTIONS[name]}." for name in workloads]
    compared = "W3 compares time per token, W4, W6, W7, W9 and W10 prompt and output tokens per second."
    return "\n".join([*rows, "", *texts, compared, ""])


def _offline_tables(lines: list[Line], model: str) -> str:
    rows = [f"## {model}", ""]
    for workload, description in DESCRIPTIONS.items():
        figures = medians(lines, model, workload)
        if not figures:
            continue
        names = set(best_entries(lines, model, workload).values())
        shown = [(ENTRIES[name], figures[name]) for name in names]
        shown.sort(key=lambda item: -speed(workload, item[1]))
        rows += [f"### {workload}: {description}", "", *_table(workload, shown), ""]
        if workload == "W3" and (share := _bandwidth_note(lines, model, shown)):
            rows += [share, ""]
    return "\n".join(rows)


def bandwidth_gb_per_s(lines: list[Line], model: str) -> float | None:
    """Read bandwidth of the machine, measured in the rounds of this model."""
    found = [line["gb_per_s"] for line in lines if line["workload"] == BANDWIDTH and line["model"] == model]
    return statistics.median(found) if found else None


def bandwidth_share(figures: Line, gb_per_s: float | None) -> float | None:
    """Of one stream: bytes of the weights, as stored by the engine or else in its file, per time of a token."""
    kept_mb, read_mb = figures.get("weights_mb"), figures.get("read_mb")
    if kept_mb and read_mb and kept_mb > 2 * read_mb:  # a token reads few of the experts
        read_mb *= kept_mb / figures["file_mb"]
    elif kept_mb:
        read_mb = kept_mb
    return read_mb / figures["itl_mean_ms"] / gb_per_s if read_mb and gb_per_s else None


def _bandwidth_note(lines: list[Line], model: str, shown: list[tuple[Entry, Line]]) -> str:
    gb_per_s = bandwidth_gb_per_s(lines, model)
    shares = {entry.name: bandwidth_share(figures, gb_per_s) for entry, figures in shown}
    texts = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share]
    return f"Share of this machine's read bandwidth, {gb_per_s:.1f} GB/s: {', '.join(texts)}." if texts else ""


def _table(workload: str, shown: list[tuple[Entry, Line]]) -> list[str]:
    ours = {entry.weights: speed(workload, figures) for entry, figures in shown if entry.engine == OURS}
    titles = ["engine", "weights, computed as", *(title for title, _, _ in _COLUMNS), "ours is", "rounds, spread"]
    rows = ["| " + " | ".join(titles) + " |", "|---|---|" + "--:|" * (len(titles) - 2)]
    for entry, figures in shown:
        ratio = ours.get(entry.weights, 0.0) / speed(workload, figures)
        disturbed = " !" if figures.get("other_cores", 0.0) > BIG_FOREIGN_LOAD_CORES else ""
        cells = [f"**{entry.engine}**" if entry.engine == OURS else entry.engine, _form(entry)]
        cells += [_cell(figures, key, digits) for _, key, digits in _COLUMNS]
        cells += [f"{ratio:.2f} ×" if ratio and entry.engine != OURS else "", _rounds(figures) + disturbed]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _form(entry: Entry) -> str:
    form = entry.name.partition("-")[2]
    return f"int8: {form}" if entry.weights == "int8" else form


def _rounds(figures: Line) -> str:
    return f"{figures['rounds']}, {100 * figures['spread']:.0f} %" if figures["rounds"] > 1 else "1"


def _cell(figures: Line, key: str, digits: int) -> str:
    value = figures.get(key)
    return "–" if value is None else f"{value:,.{digits}f}"


def _start_table(lines: list[Line], model: str) -> str:
    """Of each engine: seconds from the command to ready, and memory."""
    rows: list[str] = []
    cold, warm = medians(lines, model, COLD), medians(lines, model, WARM)
    for name in sorted({*cold, *warm}, key=lambda name: (ENTRIES[name].weights, ENTRIES[name].engine != OURS, name)):
        figures = warm.get(name) or cold[name]
        seconds = [_cell(part.get(name, {}), "ready_s", 2) for part in (cold, warm)]
        seconds += [_cell(figures, key, 2) for key in ("first_token_s", "restart_s")]
        keys = ("engine_pss_mb", "host_pss_mb", "pss_mb")
        sizes = [_cell(figures, key, 0) for key in keys]
        rows.append("| " + " | ".join([name, *seconds, *sizes, _rounds(figures)]) + " |")
    if not rows:
        return ""
    times = "cold s | warm s | warm, first token s | restart s"
    head = f"| engine | {times} | engine's processes MB | host MB | all MB | rounds, spread |"
    return "\n".join(["### Start and memory", "", head, "|---|" + "--:|" * 8, *rows, ""])


def perplexity_table(lines: list[Line]) -> str:
    def cell(line: Line, name: str) -> str:
        if name not in line:
            return "–"
        cost = f" ({100 * (line[name] / line['bfloat16'] - 1):+.2f} %)" if name.startswith("int") else ""
        return f"{line[name]:.3f}{cost}"

    names = ("float32", "bfloat16", "int8", "int4")
    rows = [
        f"| {line['model']} | {' | '.join(cell(line, name) for name in names)} |"
        for line in lines
        if line["workload"] == PERPLEXITY and "error" not in line
    ]
    if not rows:
        return ""
    note = "Of 9,980 tokens that are in no training data, in windows of 500, computed from the logprobs of the API."
    head = f"| real model | {' | '.join(names)} |"
    return "\n".join(["## Perplexity of real models", "", note, "", head, "|---|" + "--:|" * 4, *rows, ""])


def _failures(lines: list[Line]) -> str:
    """The last error of each entry, model and workload that was never measured."""

    def key(line: Line) -> tuple[str, ...]:
        return line["entry"], line["model"], line["workload"]

    measured = {key(line) for line in lines if "error" not in line}
    errors = {key(line): line["error"] for line in lines if "error" in line and key(line) not in measured}
    if not errors:
        return ""
    rows = [f"- {entry} on {model} {workload}: {error}" for (entry, model, workload), error in errors.items()]
    return "\n".join(["## Not measured", "", *rows, ""])
