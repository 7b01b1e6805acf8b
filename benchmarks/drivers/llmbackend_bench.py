"""Our engine through `llmbackend bench`, one process per workload. Options after `--` are passed on."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recording import append_result, machine_busy_s
from benchmarks.workloads import workload, write_workload


def run(model: str, name: str, options: Sequence[str], tree: Path | None = None) -> dict[str, Any]:
    """One workload's figures. tree: the source tree; None: the current directory, or what is installed."""
    with tempfile.TemporaryDirectory() as directory:
        requests, result = Path(directory) / f"{name}.json", Path(directory) / "result.json"
        write_workload(workload(name), requests)
        command = [sys.executable, "-m", "llmbackend.cli", "bench", "--model", model, "--workload", str(requests)]
        start_s, busy_s = time.perf_counter(), machine_busy_s()
        command += ["--json", str(result), *options]
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tree)
        if process.returncode:
            sys.exit(process.stderr)
        elapsed_s, busy_s = time.perf_counter() - start_s, machine_busy_s() - busy_s
        figures: dict[str, Any] = json.loads(result.read_text())
    figures["load_s"] = figures["ready_s"]
    figures["other_cores"] = max(0.0, busy_s - figures["cpu_s"]) / elapsed_s
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workloads", default="W1")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    for name in arguments.workloads.split(","):
        append_result(arguments.json, {"workload": name, **run(arguments.model, name, arguments.options)})


if __name__ == "__main__":
    main()
