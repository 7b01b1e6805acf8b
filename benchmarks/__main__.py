"""The suite's command line: prepares, measures in rounds and writes the page. See docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

from . import perplexity
from .checkpoints import SHAPES
from .entries import ENTRIES
from .environments import Environments
from .report import summary, write_report
from .servers import ServerSuite
from .starts import StartSuite
from .suite import Results, Suite
from .workloads import DESCRIPTIONS

ROOT = Path(__file__).resolve().parent.parent
PLOT_NAME = "benchmarks.svg"


def main() -> None:
    arguments = _arguments()
    if arguments.list:
        for entry in ENTRIES.values():
            print(f"{entry.name:24s} {entry.engine:16s} {entry.weights}{'' if entry.by_default else '  only if named'}")
        return
    environments = Environments(arguments.scratch)
    results = Results(arguments.results or environments.scratch / "results.jsonl")
    if not arguments.report_only:
        _measure(arguments, environments, results)
    _write_page(environments, results, arguments.page)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=_names(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--workloads", type=_names(DESCRIPTIONS), default=tuple(DESCRIPTIONS))
    by_default = tuple(name for name, entry in ENTRIES.items() if entry.by_default)
    parser.add_argument("--entries", type=_names(ENTRIES), default=by_default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for one workload, without loading")
    parser.add_argument("--no-servers", action="store_true")
    parser.add_argument("--no-starts", action="store_true")
    parser.add_argument("--no-perplexity", action="store_true")
    parser.add_argument("--only-servers", action="store_true", help="skip the engines alone (measured before)")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument(
        "--results", type=Path, help="JSON lines, appended to; default: results.jsonl in the scratch folder"
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--list", action="store_true", help="show the entries")
    return parser.parse_args()


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(known)}")
        return names

    return parse


def _measure(arguments: argparse.Namespace, environments: Environments, results: Results) -> None:
    if not arguments.only_servers:
        Suite(
            environments=environments,
            results=results,
            models=arguments.models,
            workloads=arguments.workloads,
            entries=arguments.entries,
            rounds=arguments.rounds,
            timeout_s=arguments.timeout_s,
        ).run()
    if not arguments.no_perplexity:
        perplexity.run(results)
    if not arguments.no_starts:
        StartSuite(environments, results, arguments.models, arguments.entries, arguments.rounds).run()
    if not arguments.no_servers:
        environments.install("vllm")
        environments.install("perf_analyzer")
        ServerSuite(environments, results, arguments.models, arguments.rounds, arguments.timeout_s).run()


def _write_page(environments: Environments, results: Results, page: Path) -> None:
    environments.install("plot")
    drawn = environments.scratch / "summary.json"
    drawn.write_text(json.dumps(summary(results.lines)))
    plot = [environments.python("plot"), Path(__file__).with_name("plot.py"), drawn, page.with_name(PLOT_NAME)]
    subprocess.run([str(word) for word in plot], check=True)
    write_report(results.lines, page, PLOT_NAME)


if __name__ == "__main__":
    main()
