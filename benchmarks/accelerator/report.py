"""Writes the report of a run: decode relative to memory bandwidth, prefill relative to peak matmul, and the rest.

Independent of how anything was measured. Invariants: percentages refer to what the same
device reached in the same run; failures are listed, not left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Line = dict[str, Any]
_ENGINES = {"engine_runs": "llmbackend", "transformers_runs": "transformers"}
_CHECKED = (
    "tokens", "attention", "product", "experts", "sampled", "tests", "sanitized", "sanitizer", "equality", "block bits",
    "fault",
)  # fmt: skip


def page(lines: list[Line]) -> str:
    ceilings = next((line for line in lines if line["section"] == "ceilings" and "copy_bytes_per_s" in line), None)
    sections = [_head(ceilings), _failures(lines), _checks(lines)]
    if ceilings:
        sections += [_decode(lines, ceilings), _prefill(lines, ceilings), _products(lines, ceilings)]
        sections += [_experts(lines, ceilings), _sweep(lines, ceilings), _libraries(lines, ceilings)]
    sections += [
        _kernels(lines),
        _sampling(lines),
        _speculation(lines),
        _windows(lines),
        _adapters(lines),
        _copies(lines),
    ]
    sections += [_first_requests(lines), _workloads(lines), _server(lines), _starts(lines)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(ceilings: Line | None) -> str:
    if ceilings is None:
        return "# On a GPU\n\nThe device's own ceilings were not measured in this part, so no shares are given."
    return (
        f"# On a GPU\n\n`python benchmarks/gpu.py` on one {ceilings['device_name']}, torch {ceilings['torch']}, CUDA "
        f"{ceilings['cuda']}; random weights, bfloat16. Measured here: copies at "
        f"{ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s (bytes read plus bytes written), bfloat16 products at "
        f"{ceilings['matmul_flops'] / 1e12:.0f} TFLOP/s."
    )


def _failures(lines: list[Line]) -> str:
    failed = [line for line in lines if line.get("failure")]
    rows = [f"- {line['section']} {line['shape']} {line['label']}: {line['failure']}" for line in failed]
    return "\n".join(["## What failed or was cut", "", *rows]) if rows else ""


def _checks(lines: list[Line]) -> str:
    rows = []
    for section in dict.fromkeys(line["section"] for line in lines):
        for measure in _CHECKED:
            of = [line for line in _of(lines, measure) if line["section"] == section]
            wrong = [line for line in of if line.get("wrong") or line.get("different") or line.get("failed")]
            wrong += [line for line in of if line.get("lost") or line.get("changed")]
            worst = max((line["error"] for line in of if isinstance(line.get("error"), float)), default=0.0)
            if of:
                rows.append((section, measure, len(of), len(wrong), f"{worst:.1e}" if worst else ""))
    return _section("Checks", ("section", "check", "cases", "wrong", "largest relative error"), rows)


def _products(lines: list[Line], ceilings: Line) -> str:
    """A row for each number of rows, a column for each kind of weight."""
    timed = list(_of(lines, "product time"))
    kinds = dict.fromkeys(line["kind"] for line in timed)
    found = {(line["case"], line["rows"], line["kind"]): line for line in timed}
    rows = [
        (case, count, *(_against_floor(found.get((case, count, kind)), ceilings) for kind in kinds))
        for case, count in dict.fromkeys((line["case"], line["rows"]) for line in timed)
    ]
    columns = ("product", "rows", *kinds)
    return _section("Products: µs (of the bandwidth floor)", columns, rows)


def _experts(lines: list[Line], ceilings: Line) -> str:
    rows = [
        (line["case"], line["rows"], _against_floor(line, ceilings), _of_peak(line, ceilings))
        for line in _of(lines, "experts time")
    ]
    columns = ("layer", "tokens", "µs (of the bandwidth floor)", "of the matmul peak")
    return _section("A layer's experts", columns, rows)


def _against_floor(line: Line | None, ceilings: Line) -> str:
    if line is None or "refused" in line:
        return "" if line is None else "refused"
    floor_s = line["floor_bytes"] / ceilings["copy_bytes_per_s"]
    return f"{line['call_s'] * 1e6:,.1f} ({floor_s / line['call_s']:.0%})"


def _of_peak(line: Line, ceilings: Line) -> str:
    return "" if "refused" in line else f"{line['flops'] / line['call_s'] / ceilings['matmul_flops']:.0%}"


def _sampling(lines: list[Line]) -> str:
    rows = [
        (line["case"], line["rows"], f"{line['call_s'] * 1e6:,.0f}", f"{line['host_s'] * 1e6:,.0f}")
        for line in _of(lines, "sampling time")
    ]
    return _section("Sampling", ("asked for, logits", "rows", "device µs", "launching µs"), rows)


def _speculation(lines: list[Line]) -> str:
    rows = [
        (line["case"], line["batch"], f"{line['output_tokens_per_s']:,.0f}", f"{line['tokens_per_step']:.2f}",
         f"{line['accepted_share']:.0%}")
        for line in _of(lines, "speculation")
    ]  # fmt: skip
    return _section("Speculation", ("drafts", "requests", "tokens/s", "tokens of a step", "drafts accepted"), rows)


def _windows(lines: list[Line]) -> str:
    rows = [
        (line["shape"], line["case"], f"{line['blocks']:.0f}", f"{line['step_s'] * 1e3:.2f}")
        for line in _of(lines, "window")
    ]
    return _section("Sliding window", ("shape", "engine", "KV blocks at most", "decode step ms"), rows)


def _adapters(lines: list[Line]) -> str:
    timed = list(_of(lines, "adapters"))
    plain_s = next((line["step_s"] for line in timed if "without" in line["case"]), None)
    rows = [
        (line["shape"], line["case"], line["rows"], f"{line['step_s'] * 1e3:.2f}",
         f"{line['step_s'] / plain_s:.2f}" if plain_s else "")
        for line in timed
    ]  # fmt: skip
    return _section("LoRA adapters", ("shape", "asked for", "rows", "decode step ms", "of the step without"), rows)


def _copies(lines: list[Line]) -> str:
    rows = [(line["case"], f"{line['bytes_per_s'] / 1e9:.1f}") for line in _of(lines, "copy")]
    return _section("KV blocks and host memory", ("copy", "GB/s"), rows)


def _sweep(lines: list[Line], ceilings: Line) -> str:
    rows = []
    for line in _of(lines, "sweep"):
        if "refused" in line:
            rows.append((line["case"], line["configuration"], "", "", line["refused"].splitlines()[0][:60]))
            continue
        bandwidth = line["kv_bytes"] / line["call_s"] / ceilings["copy_bytes_per_s"]
        flops = line["flops"] / line["call_s"] / ceilings["matmul_flops"]
        figures = (f"{line['call_s'] * 1e6:.1f}", f"{bandwidth:.0%}", f"{flops:.0%}")
        rows.append((line["case"], line["configuration"], *figures))
    columns = ("step", "parameters", "µs", "of the bandwidth", "of the matmul peak")
    return _section("Attention with other parameters", columns, rows)


def _libraries(lines: list[Line], ceilings: Line) -> str:
    rows = []
    for line in _of(lines, "library"):
        took = "" if "refused" in line else f"{line['call_s'] * 1e6:,.1f}"
        rows.append((line["case"], line["kind"], took, _of_peak(line, ceilings), line.get("refused", "")[:60]))
    columns = ("step", "by", "µs", "of the matmul peak", "refused")
    return _section("The engine's kernels and torch's", columns, rows)


def _kernels(lines: list[Line]) -> str:
    rows: list[tuple[Any, ...]] = []
    for profile in _of(lines, "profile"):
        head = f"**all, busy {profile['busy']:.0%} of the time**"
        rows.append((profile["case"], head, "", f"{profile['step_s'] * 1e6:,.0f}", ""))
        for line in _of(lines, "kernel"):
            if line["case"] == profile["case"]:
                figures = (f"{line['calls_per_step']:.1f}", f"{line['us_per_step']:,.1f}", f"{line['share']:.1%}")
                rows.append((line["case"], f"`{line['kernel']}`", *figures))
    return _section("Kernels of a step", ("step", "kernel", "calls", "µs", "share"), rows)


def _first_requests(lines: list[Line]) -> str:
    rows = [
        (line["case"], f"{line['first_s'] * 1e3:.0f}", f"{line['second_s'] * 1e3:.0f}", ", ".join(line["compiled"]))
        for line in _of(lines, "first request")
    ]
    return _section("First requests", ("kind", "first ms", "second ms", "compiled meanwhile"), rows)


def _decode(lines: list[Line], ceilings: Line) -> str:
    rows = []
    for line in _of(lines, "decode"):
        floor_s = line["floor_bytes"] / ceilings["copy_bytes_per_s"]
        cells = (line["batch"], line["prompt_tokens"], f"{line['step_s'] * 1e3:.2f}", f"{floor_s / line['step_s']:.0%}")
        host = f"{line['host_s'] * 1e6:.0f} ({line['host_s'] / line['step_s']:.0%})"
        rows.append((line["shape"], line["label"], *cells, host, f"{line['batch'] / line['step_s']:,.0f}"))
    columns = (
        "shape", "configuration", "batch", "prompt tokens", "step ms", "of the bandwidth floor", "exposed host µs",
        "tokens/s",
    )  # fmt: skip
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
        engine = _ENGINES[line["section"]]
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
        if line["section"] == "engine_runs" and not line["label"] and " 32 in, " in line["workload"]
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
        (line["shape"], _ENGINES.get(line["section"], line["section"]), line["label"], f"{line['ready_s']:.1f}")
        for line in _of(lines, "start")
    ]
    return _section("Start", ("shape", "engine", "configuration", "seconds to ready"), rows)


def _of(lines: list[Line], measure: str) -> Iterator[Line]:
    return (line for line in lines if line.get("measure") == measure)


def _section(title: str, columns: Iterable[str], rows: list[Any]) -> str:
    if not rows:
        return ""
    table = [tuple(columns), ("---",) * len(tuple(columns)), *rows]
    return "\n".join([f"## {title}", "", *("| " + " | ".join(map(str, row)) + " |" for row in table)])
