"""Writes docs/benchmarks_int4.md: weights in 4 bits, compared with llama.cpp on the same file and OpenVINO's int4.

Used by `python -m benchmarks --int4`; independent of how anything was measured. Invariants: those of report.py; an
engine's figure is that of its fastest entry for the workload, including flags.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import llmbackend

from .entries import ENTRIES, FOUR_BITS, OURS
from .environments import LLAMA_CPP_PYTHON, OPENVINO
from .models import OPENVINO_INT4
from .report import (
    FILE_PERPLEXITY,
    WARM,
    Line,
    bandwidth_gb_per_s,
    bandwidth_share,
    best_by_engine,
    last_day,
    measured_on,
    medians,
    models_of,
    num_rounds,
    perplexity_table,
    ratios,
    speed,
    tables,
)
from .workloads import DESCRIPTIONS

LLAMA_CPP, OPENVINO_ENGINE = "llama.cpp", "OpenVINO GenAI"
ENGINES = (OURS, LLAMA_CPP, OPENVINO_ENGINE)
NOTES_PATH = Path(__file__).with_name("notes_int4.md")


def write_int4_report(lines: list[Line], path: Path) -> None:
    parts = [
        _head(lines),
        _speeds(lines),
        _starts_and_memory(lines),
        perplexity_table(lines),
        _file_perplexities(lines),
    ]
    parts += [ratios(lines), _flags(lines), tables(lines), NOTES_PATH.read_text()]
    path.write_text("\n".join(part for part in parts if part))


def _head(lines: list[Line]) -> str:
    rounds, day = num_rounds(lines), last_day(lines)
    return f"""# Benchmarks: weights in 4 bits

llmbackend, llama.cpp and OpenVINO on one machine, with the same files and requests, alternating within one run: `make
bench ARGS=--int4` ([method](#method)). Medians of up to {rounds} rounds, {day}; greedy, end of sequence ignored.
Machine: {measured_on(lines)}. llmbackend {llmbackend.__version__}, {LLAMA_CPP_PYTHON} (its llama.cpp compiled
for this machine), {OPENVINO}.
"""


def _cases(lines: list[Line]) -> Iterable[tuple[str, str]]:
    """Pairs of model and file."""
    return ((model, weights) for model in models_of(lines) for weights in FOUR_BITS)


def _speeds(lines: list[Line]) -> str:
    measured = [name for name in DESCRIPTIONS if name != "W3" and any(line["workload"] == name for line in lines)]
    rows = [cells for model, weights in _cases(lines) if (cells := _speed_cells(lines, model, weights, measured))]
    titles = ["model", "file", *(f"{engine}, ms per token" for engine in ENGINES), "ours is"]
    titles += ["share of read bandwidth, ours", "llama.cpp", *(f"{name}: ours is" for name in measured)]
    note = 'One stream (W3) and the other workloads, all on the same file. "Ours is" compares with llama.cpp. OpenVINO '
    note += "has its own int4 of the same weights, shown in the rows of Q4_0."
    return _page_table("## Speed, file by file", note, titles, rows)


def _speed_cells(lines: list[Line], model: str, weights: str, measured: list[str]) -> list[str]:
    one_stream = {engine: figures for engine, (_, figures) in best_by_engine(lines, model, "W3", weights).items()}
    gb_per_s = bandwidth_gb_per_s(lines, model)
    shares = [bandwidth_share(one_stream.get(engine, {}), gb_per_s) for engine in (OURS, LLAMA_CPP)]
    found = [_ratio(lines, model, workload, weights) for workload in ("W3", *measured)]
    if not one_stream and not any(found):
        return []
    cells = [_number(one_stream.get(engine, {}).get("itl_mean_ms"), 2) for engine in ENGINES]
    cells += [found[0], *(f"{100 * share:.0f} %" if share else "–" for share in shares), *found[1:]]
    return [model, weights.upper(), *cells]


def _ratio(lines: list[Line], model: str, workload: str, weights: str) -> str:
    """Our speed divided by llama.cpp's."""
    best = best_by_engine(lines, model, workload, weights)
    if OURS not in best or LLAMA_CPP not in best:
        return ""
    ours, theirs = (speed(workload, best[engine][1]) for engine in (OURS, LLAMA_CPP))
    return f"**{ours / theirs:.2f} ×**"


def _starts_and_memory(lines: list[Line]) -> str:
    rows = [cells for model, weights in _cases(lines) if (cells := _start_cells(lines, model, weights))]
    titles = ["model", "file", "file MB", "second start to first token, ours s", "llama.cpp s", "ours is"]
    titles += ["our cache MB", "memory, ours MB", "llama.cpp MB", "KV MB", "our memory / (file + KV)"]
    note = "A second start is from the command to the first token, for llmbackend with its HTTP and gRPC ports, for "
    note += "llama.cpp the engine alone. Memory is PSS at the end of the workload of 64 requests; KV is that of our "
    note += "blocks."
    return _page_table("## Second start and memory", note, titles, rows)


def _start_cells(lines: list[Line], model: str, weights: str) -> list[str]:
    starts = [_second_start(lines, model, weights, engine) for engine in (OURS, LLAMA_CPP)]
    first_s = [start.get("first_token_s") for start in starts]
    best = best_by_engine(lines, model, "W8", weights) or best_by_engine(lines, model, "W1", weights)
    ours, theirs = (best.get(engine, ("", Line()))[1] for engine in (OURS, LLAMA_CPP))
    if not ours and not any(starts):
        return []
    ratio = f"{first_s[0] / first_s[1]:.2f} ×" if first_s[0] and first_s[1] else ""
    needed_mb = ours["file_mb"] + ours["kv_mb"] if ours else 0.0
    share = f"{ours['pss_mb'] / needed_mb:.2f} ×" if needed_mb else ""
    cells = [_number(ours.get("file_mb"), 0), *(_number(seconds, 2) for seconds in first_s), ratio]
    cells.append(_number(starts[0].get("cache_mb"), 0))
    cells += [_number(figures.get("pss_mb"), 0) for figures in (ours, theirs)]
    return [model, weights.upper(), *cells, _number(ours.get("kv_mb"), 0), share]


def _second_start(lines: list[Line], model: str, weights: str, engine: str) -> Line:
    """Figures of the engine's fastest entry; {} if none was started."""
    found = [
        figures
        for name, figures in medians(lines, model, WARM).items()
        if ENTRIES[name].weights == weights and ENTRIES[name].engine == engine
    ]
    return min(found, key=lambda figures: float(figures["first_token_s"]), default={})


def _file_perplexities(lines: list[Line]) -> str:
    found = {(line["model"], line["entry"]): line for line in lines if line["workload"] == FILE_PERPLEXITY}
    rows = []
    for model in dict.fromkeys(model for model, _ in found):
        ours, theirs = (found.get((model, engine), {}) for engine in (OURS, LLAMA_CPP))
        for kind in ("f16", "q4_1", "q4_0", "q4_k_m"):
            if kind not in ours and kind not in theirs:
                continue
            both = kind in ours and kind in theirs
            difference = f"{100 * (ours[kind] / theirs[kind] - 1):+.2f} %" if both else ""
            rows.append([model, kind.upper(), _number(ours.get(kind), 3), _number(theirs.get(kind), 3), difference])
    note = "The same text, tokens and windows; llama.cpp's is computed from its logits."
    return _page_table("## Perplexity of files", note, ["model", "file", OURS, LLAMA_CPP, "difference"], rows)


def _flags(lines: list[Line]) -> str:
    measured = {line["entry"] for line in lines}
    rows = [
        [f"`{name}`", entry.engine, f"`{entry.model.format('MODEL')}`", _code(entry.options)]
        for name, entry in ENTRIES.items()
        if name in measured
    ]
    options = " ".join(OPENVINO_INT4)
    note = f"The fastest of an engine's entries is shown. OpenVINO's int4 is made by `optimum-cli` with `{options}`."
    return _page_table("## Entries", note, ["entry", "engine", "model", "flags"], rows)


def _code(options: Iterable[str]) -> str:
    words = " ".join(word for word in options if word != "--")
    return f"`{words}`" if words else ""


def _page_table(title: str, note: str, titles: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    head = ["| " + " | ".join(titles) + " |", "|---|---|" + "--:|" * (len(titles) - 2)]
    return "\n".join([title, "", note, "", *head, *("| " + " | ".join(cells) + " |" for cells in rows), ""])


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
