"""Greedy output of the engine equals `transformers` generate, token for token, in float32, for tiny random models.

Every run is made hard on purpose: mixed prompt lengths in one batch, a budget of seven tokens per step (so prompts are
chunked and mixed with decodes), and KV memory so small that requests are preempted and recomputed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_models import (
    FAMILIES,
    engine_tokens,
    expected_tokens,
    prompts,
    random_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    expected = [expected_tokens(model, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "the random model's output is degenerate"
    assert max(len(set(tokens)) for tokens in expected) > 4, "the random model's output is degenerate"

    roomy, _ = engine_tokens(tmp_path)
    assert roomy == expected
    cramped, preemptions = engine_tokens(
        tmp_path, block_size=4, num_kv_blocks=16, max_num_batched_tokens=7, step_target_ms=0
    )
    assert cramped == expected
    assert preemptions > 0, "the KV memory was meant to be too small"
