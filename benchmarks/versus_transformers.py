"""Our engine against transformers' own continuous batching: same machine, same checkpoint, same requests, one run.

    python benchmarks/versus_transformers.py --json result.json

Both run in processes of their own with the same number of threads, in turns, so that a machine that drifts slows both.
For: the figures in docs/. Does not know: how either works. Invariant: the checkpoint and the requests are drawn from
fixed seeds. `--requests` and `--max-output-tokens` make a smaller run for a quick look; figures come from the full one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workloads import NUM_REQUESTS, write_checkpoint, write_workload

ENGINES = {
    "llmbackend": [sys.executable, "-m", "llmbackend.cli", "bench"],
    "transformers": [sys.executable, str(Path(__file__).with_name("transformers_cb.py"))],
}
COLUMNS = ("wall_s", "output_tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "peak_rss_mb", "load_s")


def run_engine(engine: str, model: Path, workload: Path, threads: int) -> dict[str, Any]:
    """One run in a fresh process; its figures."""
    result = workload.with_name(f"{workload.stem}-{engine}.json")
    command = [*ENGINES[engine], "--model", str(model), "--workload", str(workload), "--json", str(result)]
    pinned = {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
    subprocess.run([*command, "--dtype", "bfloat16"], check=True, env=os.environ | pinned, stdout=subprocess.DEVNULL)
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def compare(arguments: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """All runs, engines in turns."""
    model = scratch / "qwen2.5-0.5b-shape"
    if not (model / "config.json").exists():
        write_checkpoint(model)
    runs = []
    for round_number in range(arguments.rounds):
        for name in arguments.workloads.split(","):
            path = scratch / f"{name}.json"
            write_workload(name, path, arguments.requests, arguments.max_output_tokens)
            for engine in ENGINES:
                figures = run_engine(engine, model, path, arguments.threads)
                runs.append({"engine": engine, "workload": name, "round": round_number, **figures})
                print(f"{name} round {round_number} {engine}: {figures['wall_s']:.2f} s", flush=True)
    return runs


def ratios(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Per workload: how many times sooner our engine finishes, best run against best run."""
    best: dict[tuple[str, str], float] = {}
    for run in runs:
        key = (run["workload"], run["engine"])
        best[key] = min(best.get(key, float("inf")), run["wall_s"])
    names = dict.fromkeys(run["workload"] for run in runs)
    return {name: best[name, "transformers"] / best[name, "llmbackend"] for name in names}


def show(runs: list[dict[str, Any]], sooner: dict[str, float]) -> None:
    table = Table("workload", "engine", *COLUMNS)
    for run in runs:
        table.add_row(run["workload"], run["engine"], *(f"{run[column]:.1f}" for column in COLUMNS))
    console = Console(width=140)
    console.print(table)
    for name, ratio in sooner.items():
        console.print(f"{name}: llmbackend finishes {ratio:.2f} times sooner than transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, help="keeps the checkpoint here between runs; default: a temporary one")
    parser.add_argument("--workloads", default="W1,W2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--max-output-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = arguments.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        runs = compare(arguments, scratch)
    sooner = ratios(runs)
    show(runs, sooner)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"sooner": sooner, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
