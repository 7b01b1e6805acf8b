"""Random sampling parameters, for tests that compare one sampler with another."""

from __future__ import annotations

from typing import Any

import numpy as np


def random_parameters(
    rng: np.random.Generator, vocab: int, *, largest_top_p: float, most_logprobs: int
) -> dict[str, Any]:
    """Of one request, each limit and edit by chance. largest_top_p: of those that are a limit."""
    parameters: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7]),
        "top_k": int(rng.choice([0, 0, 1, 5, 50, 2000])),
        "top_p": rng.choice([1.0, 1.0, 1e-9, 0.1, 0.9, largest_top_p]),
        "min_p": rng.choice([0.0, 0.0, 1e-6, 0.05, 0.9]),
        "seed": int(rng.integers(1 << 62)) * 4,
    }
    if rng.random() < 0.3:
        parameters["logprobs"] = int(rng.choice([0, 1, 5, min(vocab, most_logprobs)]))
    if rng.random() < 0.3:
        parameters |= {"repetition_penalty": 1.4, "frequency_penalty": 0.3}
    if rng.random() < 0.3:
        parameters |= {"presence_penalty": -0.7, "logit_bias": {1: 2.5, vocab - 1: -1.0}}
    if rng.random() < 0.3:
        parameters |= {"min_tokens": 8, "stop_token_ids": (2, vocab - 2)}
    return parameters
