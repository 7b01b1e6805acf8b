"""`python -m benchmarks.servers`: measures what is missing, and writes its part of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

from ..environments import Environments
from ..name_lists import names_of
from ..suite import Results
from .campaign import Campaign
from .contenders import CONTENDERS, KINDS, MODELS
from .loads import LOADS
from .page import PICTURE, RESULTS, summary, write_section

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    arguments = _arguments()
    environments, results = Environments(arguments.scratch), Results(arguments.results)
    if not arguments.report_only:
        for name in ("vllm", "llama-server"):
            environments.install(name)
        Campaign(
            environments,
            results,
            arguments.models,
            arguments.weights,
            arguments.servers,
            arguments.loads,
            arguments.rounds,
            time.monotonic() + 60 * arguments.minutes,
        ).run()
    _write(environments, results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    choices = {"models": [one.name for one in MODELS], "servers": [one.name for one in CONTENDERS], "weights": KINDS}
    # Loads have commas in their names.
    for name, known in (choices | {"loads": [load.name for load in LOADS]}).items():
        parser.add_argument(f"--{name}", type=names_of(known, ";"), default=tuple(known), help=", ".join(known))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6, help="no load begins later; run it again to go on")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, appended to")
    parser.add_argument("--report-only", action="store_true")
    return parser.parse_args()


def _write(environments: Environments, results: Results) -> None:
    environments.install("plot")
    drawn = environments.scratch / "summary_servers.json"
    drawn.write_text(json.dumps(summary(results.lines)))
    plot = [environments.python("plot"), ROOT / "benchmarks" / "plot.py", drawn, ROOT / "docs" / PICTURE]
    subprocess.run([str(word) for word in plot], check=True)
    write_section(results.lines, ROOT / "docs" / "benchmarks.md")


if __name__ == "__main__":
    main()
