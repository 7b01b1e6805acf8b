"""Writes docs/benchmarks_experts.md: a mixture of experts, compared with vLLM and llama.cpp.

Used by `python -m benchmarks --experts`; independent of how anything was measured. Invariants: those of report.py.
"""

from __future__ import annotations

from pathlib import Path

import llmbackend

from .environments import LLAMA_CPP_PYTHON, VLLM_VERSION
from .report import Line, last_day, measured_on, num_rounds, ratios, tables

NOTES_PATH = Path(__file__).with_name("notes_experts.md")


def write_experts_report(lines: list[Line], path: Path) -> None:
    parts = [_head(lines), ratios(lines), tables(lines), NOTES_PATH.read_text()]
    path.write_text("\n".join(parts))


def _head(lines: list[Line]) -> str:
    versions = f"llmbackend {llmbackend.__version__}, vLLM {VLLM_VERSION} (CPU), {LLAMA_CPP_PYTHON}"
    return f"""# Benchmarks: a mixture of experts

The shape of a Qwen3-MoE with 64 experts in each of 18 decoder layers, 8 of them for each token: 2.9 B parameters, of
which a token uses 0.45 B; random weights. Engines alternate within one run: `make bench ARGS=--experts`. Medians of
{num_rounds(lines)} rounds, {last_day(lines)}; greedy, end of sequence ignored, all requests at once.
{measured_on(lines)}.
{versions}.
"""
