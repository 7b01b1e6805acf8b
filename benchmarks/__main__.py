"""The suite's command line: prepares, measures in rounds and writes the page. See docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import perplexity
from .checkpoints import CONTEXT_TOKENS
from .entries import ENTRIES, FOUR_BITS, default_entries
from .environments import Environments
from .experts_report import write_experts_report
from .int4_report import write_int4_report
from .lora_report import write_lora_report
from .loras import KINDS as LORA_KINDS
from .loras import LoraSuite
from .name_lists import names_of
from .report import Line, of_newest_machine, summary, write_report
from .servers.page import RESULTS, write_section
from .starts import StartSuite
from .suite import Results, Suite
from .workloads import DESCRIPTIONS, SHORT

ROOT = Path(__file__).resolve().parent.parent
PLOT_NAME = "benchmarks.svg"


@dataclass(frozen=True)
class Campaign:
    """What is measured unless the command line says otherwise, and the names of the results and their page."""

    about: str
    models: tuple[str, ...]
    workloads: tuple[str, ...]
    entries: tuple[str, ...]
    results: Path
    """Below the scratch folder, unless absolute."""
    page: str
    write_page: Callable[[list[Line], Path], None] | None = None
    """None: the plain page, with its picture and the servers."""
    rounds: int = 3
    has_perplexity: bool = False
    has_starts: bool = False


PLAIN = Campaign(
    about="bfloat16 and 8 bits",
    models=("qwen2.5-0.5b-shape", "llama-125m-shape"),
    workloads=tuple(name for name in DESCRIPTIONS if name not in SHORT),
    entries=default_entries("bf16", "int8"),
    results=Path(__file__).with_name("results.jsonl"),
    page="benchmarks.md",
    has_perplexity=True,
    has_starts=True,
)
INT4 = Campaign(
    about="weights in 4 bits, including GGUF files",
    models=("smollm2", "qwen2.5-0.5b-shape", "qwen3-1.7b-shape", "llama3-8b-shape", "moe-3b-shape"),
    workloads=("W3", "W8", "W9"),
    entries=default_entries(*FOUR_BITS),
    results=Path("results_int4.jsonl"),
    page="benchmarks_int4.md",
    write_page=write_int4_report,
    has_perplexity=True,
    has_starts=True,
)
EXPERTS = Campaign(
    about="a mixture of experts in every weight type",
    models=("moe-3b-shape",),
    workloads=("W3", "W8", "W9"),
    entries=(
        "llmbackend-bfloat16",
        "vllm-bfloat16",
        "vllm-float32",
        "llmbackend-int8",
        "llama.cpp-q8_0",
        "llmbackend-q4_0",
        "llama.cpp-q4_0",
        "llama.cpp-q4_0-plain-attention",
    ),
    results=Path("results_experts.jsonl"),
    page="benchmarks_experts.md",
    write_page=write_experts_report,
)
LORA = Campaign(
    about="LoRA adapters",
    models=(LoraSuite.shape,),
    workloads=(),
    entries=(),
    results=Path("results_lora.jsonl"),
    page="benchmarks_lora.md",
    write_page=write_lora_report,
    rounds=LoraSuite.rounds,
)
CAMPAIGNS = {"plain": PLAIN, "int4": INT4, "experts": EXPERTS, "lora": LORA}


def main() -> None:
    arguments = _arguments()
    if arguments.list:
        for entry in ENTRIES.values():
            print(f"{entry.name:32s} {entry.engine:16s} {entry.weights}{'' if entry.by_default else '  only if named'}")
        return
    environments = Environments(arguments.scratch)
    results = Results(arguments.results)
    if not arguments.report_only:
        _measure(arguments, environments, results)
    lines = of_newest_machine(results.lines)
    if arguments.campaign.write_page is None:
        _write_plain_page(environments, lines, arguments.page)
    else:
        arguments.campaign.write_page(lines, arguments.page)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    for name, campaign in CAMPAIGNS.items():
        default = " (default)" if campaign is PLAIN else ""
        about = f"{campaign.about}: writes {campaign.page}{default}"
        chosen.add_argument(f"--{name}", dest="campaign", action="store_const", const=campaign, help=about)
    parser.set_defaults(campaign=PLAIN)
    parser.add_argument("--models", type=names_of(CONTEXT_TOKENS))
    parser.add_argument("--workloads", type=names_of(DESCRIPTIONS))
    parser.add_argument("--entries", type=names_of(ENTRIES))
    parser.add_argument("--rounds", type=int, help=f"default: {PLAIN.rounds}, of adapters {LORA.rounds}")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for one workload, without loading")
    parser.add_argument("--no-starts", action="store_true")
    parser.add_argument("--no-perplexity", action="store_true")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench")
    about_results = "JSON lines, appended to; default: benchmarks/results.jsonl, other pages: in the scratch folder"
    parser.add_argument("--results", type=Path, help=about_results)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--list", action="store_true", help="show the entries")
    arguments = parser.parse_args()
    if arguments.campaign is LORA and (arguments.models or arguments.workloads or arguments.entries):
        parser.error(
            "--lora takes no --models, --workloads and --entries; python -m benchmarks.loras has its own flags"
        )
    return _with_defaults(arguments)


def _with_defaults(arguments: argparse.Namespace) -> argparse.Namespace:
    campaign = arguments.campaign
    arguments.models = arguments.models or campaign.models
    arguments.workloads = arguments.workloads or campaign.workloads
    arguments.entries = arguments.entries or campaign.entries
    arguments.rounds = arguments.rounds or campaign.rounds
    arguments.page = arguments.page or ROOT / "docs" / campaign.page
    arguments.results = arguments.results or arguments.scratch / campaign.results
    return arguments


def _measure(arguments: argparse.Namespace, environments: Environments, results: Results) -> None:
    if arguments.campaign is LORA:
        _measure_adapters(results, arguments.rounds)
        return
    Suite(
        environments=environments,
        results=results,
        models=arguments.models,
        workloads=arguments.workloads,
        entries=arguments.entries,
        rounds=arguments.rounds,
        timeout_s=arguments.timeout_s,
    ).run()
    if arguments.campaign.has_perplexity and not arguments.no_perplexity:
        perplexity.run(environments, results)
        if arguments.campaign is INT4:
            perplexity.run_files(environments, results)
    if arguments.campaign.has_starts and not arguments.no_starts:
        StartSuite(environments, results, arguments.models, arguments.entries, arguments.rounds).run()


def _measure_adapters(results: Results, rounds: int) -> None:
    """Each kind of weights that the results lack."""
    suite = LoraSuite(rounds=rounds)
    for kind in (kind for kind in LORA_KINDS if not results.has(weights=kind)):
        suite.run([kind], results.add)
    if not any("pause_p50_ms" in line for line in results.here):
        suite.run_reads(["int8"], results.add)


def _write_plain_page(environments: Environments, lines: list[Line], page: Path) -> None:
    environments.install("plot")
    drawn = environments.scratch / "summary.json"
    drawn.write_text(json.dumps(summary(lines)))
    plot = [environments.python("plot"), Path(__file__).with_name("plot.py"), drawn, page.with_name(PLOT_NAME)]
    subprocess.run([str(word) for word in plot], check=True)
    write_report(lines, page, PLOT_NAME)
    write_section(Results(RESULTS).lines, page)


if __name__ == "__main__":
    main()
