"""The benchmark of weights in 4 bits: its files can be served, and its page says what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from benchmarks.bandwidth import read_gb_per_s
from benchmarks.entries import ENTRIES, FOUR_BITS, default_entries
from benchmarks.int4_report import write_int4_report
from benchmarks.models import bytes_per_token
from benchmarks.perplexity import perplexity
from benchmarks.random_gguf import WEIGHT_DEVIATION, Shape, random_matrix, type_of, write_random_gguf
from benchmarks.report import BANDWIDTH, FILE_PERPLEXITY, WARM, Line
from benchmarks.workloads import DESCRIPTIONS, PREFILL, workload
from llmbackend.gguf.header import read_header

SHAPE = Shape(hidden=256, mlp=512, layers=8, heads=4, kv_heads=2, head_dim=64, vocabulary=300)
MIXTURE = replace(SHAPE, architecture="qwen3moe", mlp=256, layers=2, experts=4, chosen=2)


GPT_OSS = replace(MIXTURE, architecture="gpt-oss")


@pytest.mark.parametrize(
    ("shape", "kind"),
    [(SHAPE, "q4_0"), (SHAPE, "q4_k_m"), (MIXTURE, "q4_0"), (MIXTURE, "q4_k_m"), (GPT_OSS, "mxfp4")],
)
def test_a_random_file_is_a_model_that_can_be_served(tmp_path: Path, shape: Shape, kind: str) -> None:
    path = tmp_path / "random.gguf"
    write_random_gguf(path, kind, shape)
    tensors = read_header(path).tensors
    assert set(tensors) == {
        *(f"{name}.weight" for name, _, _ in shape.matrices()),
        *(name for name, _ in shape.vectors()),
    }
    unread = tensors["token_embd.weight"].size_bytes
    unread += sum(info.size_bytes // 2 for name, info in tensors.items() if "_exps" in name)
    assert bytes_per_token(path) == sum(info.size_bytes for info in tensors.values()) - unread
    assert np.isfinite(perplexity(path, [tuple(range(3, 40))]))


def test_types_are_those_of_llama_cpps_quantiser() -> None:
    more = [layer for layer in range(32) if type_of(f"blk.{layer}.attn_v", "q4_k_m", 32) == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert type_of("blk.0.attn_q", "q4_k_m", 32) == "Q4_K"
    assert [type_of(name, "q4_0", 32) for name in ("blk.0.attn_v", "output")] == ["Q4_0", "Q6_K"]


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "MXFP4"])
def test_random_blocks_are_weights_of_usual_size(type_name: str) -> None:
    data = random_matrix(np.random.default_rng(0), 64, 512, type_name)
    deviation = dequantize(data, GGMLQuantizationType[type_name]).std()
    usual = WEIGHT_DEVIATION / 4 if type_name == "MXFP4" else WEIGHT_DEVIATION
    assert usual / 2 < deviation < usual * 2


def test_four_bits_are_measured_only_by_their_own_command() -> None:
    assert not set(default_entries("bf16", "int8")) & set(default_entries(*FOUR_BITS))
    for name in default_entries(*FOUR_BITS):
        assert ENTRIES[name].weights in FOUR_BITS


def test_every_workload_has_requests_as_described() -> None:
    for name in DESCRIPTIONS:
        requests = workload(name)
        assert all((request.output_tokens == 1) == (name in PREFILL) for request in requests)


def test_reading_has_a_rate() -> None:
    assert read_gb_per_s(buffer_bytes=1 << 20, rounds=2) > 0


def test_the_page_compares_the_same_file(tmp_path: Path) -> None:
    """Ours takes 10 ms for 200 MB, llama.cpp 15 or, with other flags, 12, where the machine reads 25 GB/s."""
    lines = [_line("llmbackend-q4_0", "W3", itl_mean_ms=10.0, weights_mb=200.0)]
    lines += [
        _line("llama.cpp-q4_0", "W3", itl_mean_ms=15.0),
        _line("llama.cpp-q4_0-plain-attention", "W3", itl_mean_ms=12.0),
    ]
    lines += [_line("llmbackend-q4_0", "W8", output_tokens_per_s=300.0, kv_mb=50.0, pss_mb=300.0)]
    lines += [_line("llama.cpp-q4_0", "W8", output_tokens_per_s=100.0, pss_mb=400.0)]
    lines += [_line("llmbackend-q4_0", WARM, first_token_s=1.0, ready_s=0.9, pss_mb=1.0, cache_mb=210.0)]
    lines += [_line("llama.cpp-q4_0", WARM, first_token_s=2.0, ready_s=1.9, pss_mb=1.0)]
    lines += [_line("", BANDWIDTH, gb_per_s=25.0)]
    lines += [_line("llmbackend", FILE_PERPLEXITY, q4_1=20.2), _line("llama.cpp", FILE_PERPLEXITY, q4_1=20.0)]
    write_int4_report(lines, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| smollm2 | Q4_0 | 10.00 | 12.00 | – | **1.20 ×** | 80 % | 67 % | **3.00 ×** |" in page
    assert "| smollm2 | Q4_0 | 200 | 1.00 | 2.00 | 0.50 × | 210 | 300 | 400 | 50 | 1.20 × |" in page
    assert "| smollm2 | Q4_1 | 20.200 | 20.000 | +1.00 % |" in page
    assert "--flash-attention off" in page


def _line(entry: str, name: str, **figures: float) -> Line:
    common = {"model": "smollm2", "round": 0, "wall_s": 1.0, "file_mb": 200.0, "read_mb": 200.0}
    return {**common, "entry": entry, "workload": name, **figures}
