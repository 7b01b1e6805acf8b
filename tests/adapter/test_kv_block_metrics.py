"""The KV cache's blocks as TensorRT-LLM reports them, and the ORCA header that the host makes of them."""

from __future__ import annotations

import time
from pathlib import Path

from llm_host import ENGINE, MODEL, LlmHost, llm_host

from llmbackend.adapter.kv_block_metrics import FAMILY

BLOCKS, TOKENS = ENGINE["num_kv_blocks"], ENGINE["block_size"]


def blocks(host: LlmHost, kind: str) -> float | None:
    return host.metric(FAMILY, kv_cache_block_type=kind)


def test_blocks_are_there_from_the_start_move_with_requests_and_go_with_the_model(tmp_path: Path) -> None:
    with llm_host(tmp_path, mock_step_ms=5.0) as host:
        assert [blocks(host, kind) for kind in ("max", "used", "free", "tokens_per", "fraction")] == [
            *(BLOCKS, 0, BLOCKS, TOKENS, 0)
        ]
        call = host.start(text_input="x" * 40, stream=True, sampling={"max_tokens": 50, "ignore_eos": True})
        call.first.wait(10)
        deadline_s = time.monotonic() + 10
        while not (used := blocks(host, "used")):
            assert time.monotonic() < deadline_s
        assert used >= 40 // TOKENS and blocks(host, "free") == BLOCKS - used
        call.handle.cancel()
        call.wait()
        while blocks(host, "used"):
            assert time.monotonic() < deadline_s
        samples = host.server.metric_samples(FAMILY)
        assert {sample.labels["model"] for sample in samples} == {MODEL} and len(samples) == 5
    assert host.server.metric_samples(FAMILY) == []


def test_two_engines_share_one_sum(tmp_path: Path) -> None:
    with llm_host(tmp_path, "instance_group [ { kind: KIND_CPU, count: 2 } ]") as host:
        assert (blocks(host, "max"), blocks(host, "tokens_per")) == (2 * BLOCKS, TOKENS)
