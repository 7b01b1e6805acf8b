"""The KV cache's blocks as TensorRT-LLM reports them, and the ORCA header that the host makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmbackend.adapter.metrics import KV_BLOCK_FAMILY
from tests.helpers.llm_host import ENGINE, MODEL, LlmHost, llm_host
from tests.helpers.waiting import eventually

BLOCKS, TOKENS = ENGINE["num_kv_blocks"], ENGINE["block_size"]


def blocks(host: LlmHost, kind: str) -> float | None:
    return host.metric(KV_BLOCK_FAMILY, kv_cache_block_type=kind)


def test_blocks_are_there_from_the_start_move_with_requests_and_go_with_the_model(tmp_path: Path) -> None:
    with llm_host(tmp_path, mock_step_ms=5.0) as host:
        assert [blocks(host, kind) for kind in ("max", "used", "free", "tokens_per", "fraction")] == [
            *(BLOCKS, 0, BLOCKS, TOKENS, 0)
        ]
        call = host.start(text_input="x" * 40, stream=True, sampling={"max_tokens": 50, "ignore_eos": True})
        call.first.wait(10)
        eventually(lambda: blocks(host, "used"))
        used, free = blocks(host, "used"), blocks(host, "free")
        assert used is not None and used >= 40 // TOKENS and free == BLOCKS - used
        call.handle.cancel()
        call.wait()
        eventually(lambda: not blocks(host, "used"))
        samples = host.server.metric_samples(KV_BLOCK_FAMILY)
        assert {sample.labels["model"] for sample in samples} == {MODEL} and len(samples) == 5
    assert host.server.metric_samples(KV_BLOCK_FAMILY) == []


def test_two_engines_share_one_sum(tmp_path: Path) -> None:
    with llm_host(tmp_path, "instance_group [ { kind: KIND_CPU, count: 2 } ]") as host:
        assert (blocks(host, "max"), blocks(host, "tokens_per")) == (2 * BLOCKS, TOKENS)


def test_a_context_beyond_the_kv_memory_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with llm_host(tmp_path, num_kv_blocks=4):
        assert f"requests have at most {4 * TOKENS} tokens, of the model's 256" in caplog.text


def test_copies_to_host_memory_and_back_are_counted(tmp_path: Path) -> None:
    with llm_host(tmp_path, num_kv_blocks=12, num_host_kv_blocks=64) as host:
        for _ in range(2):
            for letter in "abcd":
                host.infer(text_input=letter * 40, sampling={"max_tokens": 2, "ignore_eos": True})
        copies = [host.metric(f"llmbackend:kv_blocks_{way}_total") for way in ("offloaded", "reloaded")]
        assert all(copies), copies
