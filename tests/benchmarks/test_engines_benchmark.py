"""The page of `make bench`: figures of one machine, named with it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.__main__ import PLAIN
from benchmarks.report import Line, of_newest_machine, write_report
from benchmarks.suite import Results


def line(machine: str, round_number: int, wall_s: float) -> Line:
    speeds = {"output_tokens_per_s": 100 / wall_s, "total_tokens_per_s": 125 / wall_s}
    key = {"machine": machine, "model": "m", "workload": "W1", "entry": "llmbackend-int8", "round": round_number}
    return {**key, **speeds, "wall_s": wall_s, "time": 86400.0}


def test_the_page_shows_the_machine_that_was_measured_last(tmp_path: Path) -> None:
    lines = [line("A, 2 cores", 0, 1.0), line("B, 4 cores", 0, 2.0), line("B, 4 cores", 1, 4.0)]
    write_report(of_newest_machine(lines), tmp_path / "page.md", "none.svg")
    text = (tmp_path / "page.md").read_text()
    assert "Machine: B, 4 cores, 1970-01-02." in text and "A, 2 cores" not in text
    assert "| **llmbackend** | int8: int8 | 37.5 |" in text and "| 2, 67 % |" in text


def test_another_machines_results_are_not_this_ones(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.add(line("A, 2 cores", 0, 1.0))
    assert not results.has(workload="W1", round=0)
    results.add({"workload": "W1", "round": 0})
    assert results.has(workload="W1", round=0)


def test_every_stored_result_names_its_machine() -> None:
    assert all(stored["machine"] for stored in Results(PLAIN.results).lines)
