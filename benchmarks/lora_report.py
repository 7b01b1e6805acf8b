"""Writes docs/benchmarks_lora.md: rows with adapters beside the same rows without.

Used by `python -m benchmarks --lora` and `python -m benchmarks.loras`; independent of how anything was measured.
Invariant: a ratio is of consecutive measurements, and the median of all ratios is shown.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import llmbackend

from .report import Line, last_day, measured_on, num_rounds

WITHOUT = "without"
NOTES_PATH = Path(__file__).with_name("notes_lora.md")


def write_lora_report(lines: list[Line], path: Path) -> None:
    path.write_text("\n".join([_head(lines), lora_tables(lines), NOTES_PATH.read_text()]))


def _head(lines: list[Line]) -> str:
    rounds, shape, rank = num_rounds(lines), lines[0]["model"].removesuffix("-shape"), lines[0]["rank"]
    return f"""# Benchmarks: LoRA adapters on a CPU

`make bench ARGS=--lora`: the engine alone, random weights in the shape of {shape}, adapters of rank {rank} for all
seven linear layers of each decoder layer. Rows decode with eight adapters, with one, and without, alternating in one
engine; a ratio is of neighbouring measurements, the median of {rounds} rounds. llmbackend {llmbackend.__version__},
{measured_on(lines)}, {last_day(lines)}.
"""


def lora_tables(lines: list[Line]) -> str:
    """Speeds, and the pauses of a stream while adapters are read."""
    kinds = list(dict.fromkeys(line["weights"] for line in lines))
    plain = [line for line in lines if "pause_p50_ms" not in line]
    cases = list(dict.fromkeys((line["rows"], line["case"]) for line in plain))
    titles = [f"{kind}, tokens/s | relative to without" for kind in kinds]
    rows = [f"| | {' | '.join(titles)} |", "|---|" + "--:|--:|" * len(kinds)] if plain else []
    for of_rows, case in sorted(cases, key=lambda key: key[0]):
        cells = [_speed_cells(plain, kind, of_rows, case) for kind in kinds]
        rows.append(f"| {of_rows}, {case} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", *_pauses(lines)])


def _speed_cells(lines: list[Line], kind: str, rows: str, case: str) -> str:
    def rates(of_case: str) -> dict[int, float]:
        wanted = {"weights": kind, "rows": rows, "case": of_case}
        return {line["round"]: line["tokens_per_s"] for line in lines if wanted.items() <= line.items()}

    found, without = rates(case), rates(WITHOUT)
    if not found:
        return "– | "
    ratio = statistics.median(rate / without[number] for number, rate in found.items())
    return f"{statistics.median(found.values()):,.1f} | {'' if case == WITHOUT else f'{100 * ratio:.1f} %'}"


def _pauses(lines: list[Line]) -> list[str]:
    read = [line for line in lines if "pause_p50_ms" in line]
    if not read:
        return []
    rows = ["| | tokens/s of the other rows | pauses of the stream: median, 99 %, longest, ms |", "|---|--:|--:|"]
    for line in read:
        pauses = ", ".join(f"{line[f'pause_{part}_ms']:.0f}" for part in ("p50", "p99", "max"))
        rows.append(f"| {line['weights']}, {line['rows']}: {line['case']} | {line['tokens_per_s']:,.1f} | {pauses} |")
    return [*rows, ""]
