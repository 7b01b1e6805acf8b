"""The benchmark of servers: every server gets the same requests, and its page says what was measured."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.environments import Environments
from benchmarks.servers.contenders import CONTENDERS, KINDS
from benchmarks.servers.loads import LOADS, OUTPUT_TOKENS, Load, requests_of
from benchmarks.servers.page import BEGIN, END, summary, write_section

LINE = {
    "model": "m", "weights": "8 bits", "server": "llmbackend", "load": "8 streams", "round": 0, "time": 0, "errors": 0,
    "output_tokens_per_s": 30.0, "ttft_p50_ms": 1, "ttft_p99_ms": 2, "itl_p50_ms": 3, "itl_p99_ms": 4, "pss_mb": 5,
    "ready_s": 6,
}  # fmt: skip
LINES = [LINE, LINE | {"server": "vLLM", "output_tokens_per_s": 40.0}, LINE | {"load": "1 stream", "error": "gone"}]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_requests_follow_from_load_and_round(load: Load) -> None:
    first, again, other = (requests_of(load, 8, number) for number in (0, 0, 1))
    assert first == again != other


def test_lengths_are_those_of_chats() -> None:
    requests = requests_of(LOADS[2], 2000, 0)
    assert statistics.fmean(one["output_tokens"] for one in requests) == pytest.approx(OUTPUT_TOKENS, rel=0.05)
    assert len({one["prompt"].split()[0] for one in requests}) > 500


def test_every_server_has_a_command_for_each_of_its_weights(tmp_path: Path) -> None:
    for contender in CONTENDERS:
        for kind in set(KINDS) & set(contender.files):
            words = contender.words(Environments(tmp_path), tmp_path / "model", 8000, kind)
            assert {str(tmp_path / "model"), "8000"} <= set(words)


def test_a_loss_stands_in_the_table_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nBelow.\n")
    for _ in range(2):
        write_section(LINES, page)
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n## Servers") and text.endswith(f"{END}\n\nBelow.\n")
    assert "| 8 streams | vLLM | 40.0 | 1 | 2 | 3.0 | 4.0 | 0 | 5 | 6.0 | 0.75 × | 1 |" in text
    assert [row["speed"] for row in summary(LINES)] == [30.0, 40.0]
