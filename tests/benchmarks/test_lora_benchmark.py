"""The benchmarks of adapters and of experts: what is measured, and what their pages say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from benchmarks.checkpoints import SHAPES
from benchmarks.experts_report import write_experts_report
from benchmarks.lora_report import WITHOUT, write_lora_report
from benchmarks.loras import LoraSuite
from benchmarks.models import bytes_per_token
from benchmarks.report import BANDWIDTH, Line


def _line(case: str, round_number: int, rate: float, **more: float) -> Line:
    keys = {"model": "qwen2.5-0.5b-shape", "weights": "int8", "rank": 16, "rows": "8 rows", "time": 0}
    return {**keys, "case": case, "round": round_number, "tokens_per_s": rate, **more}


def test_a_page_shows_the_median_of_ratios_of_neighbours(tmp_path: Path) -> None:
    lines = [_line(WITHOUT, 0, 100.0), _line("one adapter", 0, 90.0), _line(WITHOUT, 1, 200.0)]
    lines += [_line("one adapter", 1, 190.0), _line(WITHOUT, 2, 50.0), _line("one adapter", 2, 40.0)]
    pauses = {"pause_p50_ms": 1.0, "pause_p99_ms": 2.0, "pause_max_ms": 3.0}
    page = tmp_path / "page.md"
    write_lora_report([*lines, _line("another adapter for each request", 0, 70.0, **pauses)], page)
    text = page.read_text()
    assert "| 8 rows, without | 100.0 |  |" in text
    assert "| 8 rows, one adapter | 90.0 | 90.0 % |" in text
    assert "| int8, 8 rows: another adapter for each request | 70.0 | 1, 2, 3 |" in text


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_adapters_are_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=1100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192,
    )  # fmt: skip
    monkeypatch.setitem(SHAPES, "tiny", lambda: config)
    suite = LoraSuite(shape="tiny", rows=8, num_tokens=8, rounds=2, num_threads=1, known=20, num_requests=16)
    lines: list[Line] = []
    suite.run([kind], lines.append)
    suite.run_reads([kind], lines.append)
    cases = {(line["rows"], line["case"]) for line in lines}
    assert ("8 rows", "8 adapters") in cases
    assert ("a prompt of 512", "one adapter") in cases
    assert ("20 known adapters", "another adapter for each request") in cases
    assert all(line["tokens_per_s"] > 0 for line in lines)


def test_the_page_of_experts_compares_within_a_type_of_weights(tmp_path: Path) -> None:
    def line(entry: str, itl_ms: float) -> Line:
        figures = {"itl_mean_ms": itl_ms, "wall_s": 1.0, "time": 0.0}
        return {"entry": entry, "model": "moe-3b-shape", "workload": "W3", "round": 0, **figures}

    bandwidth = {"entry": "", "model": "moe-3b-shape", "workload": BANDWIDTH, "round": 0, "gb_per_s": 30.0}
    page = tmp_path / "page.md"
    write_experts_report(
        [bandwidth, line("llmbackend-bfloat16", 50.0), line("vllm-bfloat16", 100.0), line("llmbackend-int8", 30.0)],
        page,
    )
    assert "| moe-3b-shape | bfloat16 checkpoint | **2.00** (vLLM) |" in page.read_text()


def test_a_token_reads_the_experts_that_it_has(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    others = 2 * 6 * (3 * 32 * 16) * 2  # layers, experts, weights of one, bytes
    assert bytes_per_token(tmp_path) == (tmp_path / "model.safetensors").stat().st_size - others
