"""Writes the report of a run: decode relative to memory bandwidth, prefill relative to peak matmul, and the rest.

For: readers. Does not know: how anything was measured. Invariants: shares refer to what the same
device reached in the same run; failures are listed, not left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Line = dict[str, Any]
_ENGINES = {"engine_runs": "llmbackend", "transformers_runs": "transformers"}


def page(lines: list[Line]) -> str:
    ceilings = next((line for line in lines if line["part"] == "ceilings"), None)
    sections = [_head(ceilings), _failures(lines)]
    if ceilings:
        sections += [_decode(lines, ceilings), _prefill(lines, ceilings)]
    sections += [_workloads(lines), _server(lines), _starts(lines)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(ceilings: Line | None) -> str:
    if ceilings is None:
        return "# On a GPU\n\nThe device's own ceilings were not measured, so no shares are given."
    return (
        f"# On a GPU\n\n`python benchmarks/gpu.py` on one {ceilings['device_name']}, torch {ceilings['torch']}, CUDA "
        f"{ceilings['cuda']}; random weights, bfloat16. Measured here: copies at "
        f"{ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s (bytes read plus bytes written), bfloat16 products at "
        f"{ceilings['matmul_flops'] / 1e12:.0f} TFLOP/s."
    )


def _failures(lines: list[Line]) -> str:
    failed = [f"- {line['part']} {line['shape']} {line['label']}: {line['error']}" for line in lines if "error" in line]
    return "\n".join(["## What failed", "", *failed]) if failed else ""


def _decode(lines: list[Line], ceilings: Line) -> str:
    rows = []
    for line in _of(lines, "decode"):
        floor_s = line["floor_bytes"] / ceilings["copy_bytes_per_s"]
        cells = (line["batch"], f"{line['step_s'] * 1e3:.2f}", f"{floor_s / line['step_s']:.0%}")
        host = f"{line['host_s'] * 1e6:.0f} ({line['host_s'] / line['step_s']:.0%})"
        rows.append((line["shape"], line["label"], *cells, host, f"{line['batch'] / line['step_s']:,.0f}"))
    columns = ("shape", "configuration", "batch", "step ms", "of the bandwidth floor", "exposed host µs", "tokens/s")
    return _section("Decode steps", columns, rows)


def _prefill(lines: list[Line], ceilings: Line) -> str:
    rows = [
        (line["shape"], line["label"], line["workload"], f"{line['prompt_tokens_per_s']:,.0f}",
         f"{line['flops'] / ceilings['matmul_flops']:.0%}")
        for line in _of(lines, "prefill")
    ]  # fmt: skip
    return _section("Prefill", ("shape", "configuration", "prompts", "tokens/s", "of the matmul peak"), rows)


def _workloads(lines: list[Line]) -> str:
    rows = []
    for line in _of(lines, "workload"):
        engine = _ENGINES[line["part"]]
        times = (f"{line['ttft_p50_ms']:,.0f}", f"{line['ttft_p99_ms']:,.0f}", f"{line['itl_p50_ms']:.1f}")
        rows.append(
            (line["shape"], line["workload"], engine, line["label"], f"{line['output_tokens_per_s']:,.0f}", *times)
        )
    columns = ("shape", "requests", "engine", "configuration", "output tokens/s", "TTFT p50", "TTFT p99", "ITL p50 ms")
    return _section("Workloads", columns, sorted(rows, key=lambda row: row[:2]))


def _server(lines: list[Line]) -> str:
    offline = {
        (line["shape"], line["requests"]): line["output_tokens_per_s"]
        for line in _of(lines, "workload")
        if line["part"] == "engine_runs" and not line["label"] and " 32 in, " in line["workload"]
    }
    rows = []
    for line in _of(lines, "server"):
        speed, alone = line["output_tokens_per_s"], offline.get((line["shape"], line["clients"]))
        share = f"{speed / alone:.0%}" if alone else ""
        host = (f"{line['host_cpu_us_per_token']:.1f}", f"{line['host_cores']:.2f}")
        rows.append((line["shape"], line["clients"], f"{speed:,.0f}", share, *host))
    columns = ("shape", "clients", "tokens/s", "of the engine alone", "host CPU µs per token", "host cores used")
    return _section("Through the server (generate_stream)", columns, rows)


def _starts(lines: list[Line]) -> str:
    rows = [
        (line["shape"], _ENGINES[line["part"]], line["label"], f"{line['ready_s']:.1f}") for line in _of(lines, "start")
    ]
    return _section("Start", ("shape", "engine", "configuration", "seconds from process start to ready"), rows)


def _of(lines: list[Line], measure: str) -> Iterator[Line]:
    return (line for line in lines if line.get("measure") == measure)


def _section(title: str, columns: Iterable[str], rows: list[Any]) -> str:
    if not rows:
        return ""
    table = [tuple(columns), ("---",) * len(tuple(columns)), *rows]
    return "\n".join([f"## {title}", "", *("| " + " | ".join(map(str, row)) + " |" for row in table)])
