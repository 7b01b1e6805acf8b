"""The numpy sampler of the mock model: each parameter means what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmbackend.engine.messages import SamplingParams
from llmbackend.testing.mock_model import sample

LOGITS = np.array([0.0, 3.0, 1.0, 2.0, -1.0])
PROMPT = np.array([4, 4], np.int32)


def draw_many(count: int = 400, **sampling: float) -> np.ndarray:
    """How often each token comes, over many seeds."""
    tokens = [sample(LOGITS, PROMPT, 2, SamplingParams(seed=i, **sampling), ())[0] for i in range(count)]  # type: ignore[arg-type]
    return np.bincount(tokens, minlength=5) / count


def choose(tokens: list[int], **sampling: object) -> int:
    params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
    return sample(LOGITS, np.array([4, 4, *tokens], np.int32), 2, params, (1,))[0]


def test_the_draw_follows_the_distribution() -> None:
    expected = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert np.abs(draw_many(count=4000) - expected).max() < 0.03


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"top_p": 0.7}, {1, 3}),
        ({"top_p": 1e-6}, {1}),
        ({"min_p": 0.2}, {1, 3}),
    ],
)
def test_filters_leave_only_likely_tokens(sampling: dict[str, Any], possible: set[int]) -> None:
    assert set(np.flatnonzero(draw_many(**sampling))) == possible


def test_low_temperature_sharpens() -> None:
    assert draw_many(temperature=0.2)[1] > draw_many(temperature=1.0)[1] > draw_many(temperature=5.0)[1]


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample(np.zeros(5), PROMPT, 2, SamplingParams(temperature=0.0), ())[0] == 0


def test_edits_of_the_logits() -> None:
    assert choose([]) == 1
    assert choose([], logit_bias={2: 5.0}) == 2
    assert choose([], min_tokens=1) == 3
    assert choose([0], min_tokens=1) == 1
    assert choose([], min_tokens=1, ignore_eos=True) == 1
    assert choose([], min_tokens=1, stop_token_ids=(3,)) == 2
    assert choose([1], presence_penalty=2.0) == 3
    assert choose([1, 1, 3], frequency_penalty=1.0) == 1
    assert choose([1, 1, 1, 3], frequency_penalty=1.0) in (2, 3)
    assert choose([1], repetition_penalty=2.0) == 3


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    expected = LOGITS - np.log(np.exp(LOGITS).sum())
    token, logprobs = sample(LOGITS, PROMPT, 2, SamplingParams(temperature=0.0, logprobs=2, logit_bias={2: 9.0}), ())
    assert logprobs is not None
    assert (token, logprobs.token_id, logprobs.rank) == (2, 2, 3)
    assert logprobs.logprob == pytest.approx(expected[2])
    assert [token_id for token_id, _ in logprobs.top] == [1, 3]
    assert [logprob for _, logprob in logprobs.top] == pytest.approx([expected[1], expected[3]])
    assert sample(LOGITS, PROMPT, 2, SamplingParams(), ())[1] is None
