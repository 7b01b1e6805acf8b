"""Greedy output of the engine equals `transformers` generate, token for token, in float32, for tiny random models.

Every run is made hard on purpose: mixed prompt lengths in one batch, a budget of seven tokens per step (so prompts are
chunked and mixed with decodes), and KV memory so small that requests are preempted and recomputed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.model.module_runner import make_model_runner
from tests.helpers.mock_engine import make_request, run_to_end
from tests.helpers.tiny_models import FAMILIES, engine_tokens, expected_tokens, prompts, random_model

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


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gpt2", "cohere", "opt"])
def test_prompt_logprobs_are_the_models(family: str, eager: bool, tmp_path: Path) -> None:
    """Also where logits are scaled or capped behind the head."""
    model = random_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        transport="inline",
        num_threads=1,
        dtype="float32",
        enforce_eager=eager,
        max_num_batched_tokens=19,
    )
    core = EngineCore(config, make_model_runner(config))
    outcomes = run_to_end(
        core, [make_request(str(i), prompt, prompt_logprobs=3, max_tokens=2) for i, prompt in enumerate(prompts())]
    )
    core.close()
    for i, prompt in enumerate(prompts()):
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
        entries = outcomes[str(i)].prompt_logprobs
        assert [one.token_id for one in entries] == prompt[1:]
        expected = [float(logprobs[p, token_id]) for p, token_id in enumerate(prompt[1:])]
        assert [one.logprob for one in entries] == pytest.approx(expected, abs=1e-3)
        best = logprobs[: len(prompt) - 1].topk(3)
        assert [[token_id for token_id, _ in one.top] for one in entries] == best.indices.tolist()
        assert [one.top[0][1] for one in entries] == pytest.approx(best.values[:, 0].tolist(), abs=1e-3)
