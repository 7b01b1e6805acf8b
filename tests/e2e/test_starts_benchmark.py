"""The benchmark of starts, on the mock model: what it measures is there, and the page shows it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import COLD, WARM, write_report
from benchmarks.starts import measure_server
from benchmarks.suite import fits
from benchmarks.workloads import CONTEXT_TOKENS, LONG, workload
from llmbackend.server.process_memory import descendants

MODEL = "qwen2.5-0.5b-shape"


def test_a_start_its_memory_and_a_restart_are_measured_and_shown(tmp_path: Path) -> None:
    before = set(descendants())
    figures = measure_server(["--model", "mock", "--mock-step-ms", "5"], "mock", tmp_path / "cache")
    assert set(descendants()) <= before, "nothing is left"
    assert figures["first_token_s"] > figures["ready_s"] > 0 and figures["restart_s"] > 0
    assert figures["pss_mb"] == figures["host_pss_mb"] + figures["engine_pss_mb"]
    key = {"entry": "llmbackend-int8", "model": MODEL, "round": 0}
    write_report([{**figures, **key, "workload": name} for name in (COLD, WARM)], tmp_path / "page.md", "no.svg")
    page = (tmp_path / "page.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("| llmbackend-int8 |")]
    ready, first, restart = (f"{figures[key]:.2f}" for key in ("ready_s", "first_token_s", "restart_s"))
    memory = f"{figures['engine_pss_mb']:,.0f}"
    assert row.startswith(f"| llmbackend-int8 | {ready} | {ready} | {first} | {restart} | {memory} |")


def test_long_workloads_are_given_to_models_that_have_room_for_them() -> None:
    for name in LONG:
        longest = max(len(request.prompt) + request.output_tokens for request in workload(name))
        assert longest == CONTEXT_TOKENS[name]
        assert fits(name, MODEL) and not fits(name, "llama-125m-shape")
