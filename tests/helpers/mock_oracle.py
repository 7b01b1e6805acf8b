"""The oracle of the mock model: what a request generates, computed without rows, blocks or steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmbackend.engine.messages import FinishReason, InferRequest, TokenLogprobs
from llmbackend.testing import mock_model
from llmbackend.testing.mock_model import DEFAULT_MAX_MODEL_LEN, logprobs_of, mock_eos_token_id, sample


@dataclass(frozen=True, slots=True)
class MockGeneration:
    """The expected output of a request."""

    token_ids: tuple[int, ...]
    """All output tokens, including those that a resumed request came with."""
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]


def mock_generate(
    request: InferRequest, vocab_size: int = 259, max_model_len: int = DEFAULT_MAX_MODEL_LEN
) -> MockGeneration:
    """request: one that the mock model accepts."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    eos = (mock_eos_token_id(vocab_size),)
    stop_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    output = list(request.output_token_ids)
    logprobs: list[TokenLogprobs] = []
    while True:
        if output and output[-1] in stop_token_ids and len(output) > sampling.min_tokens:
            return MockGeneration(tuple(output), "stop", tuple(logprobs))
        if len(output) >= min(sampling.max_tokens, max_model_len - len(prompt)):
            return MockGeneration(tuple(output), "length", tuple(logprobs))
        context = np.array([*prompt, *output], np.int32)
        logits = mock_model.mock_logits(context, vocab_size)
        token_id, token_logprobs = sample(logits, context, len(prompt), sampling, eos)
        output.append(token_id)
        if token_logprobs is not None:
            logprobs.append(token_logprobs)


def mock_prompt_logprobs(request: InferRequest, vocab_size: int = 259) -> tuple[TokenLogprobs, ...]:
    """The expected prompt_logprobs."""
    prompt, count = np.array(request.prompt_token_ids, np.int32), request.sampling.prompt_logprobs
    wanted = vocab_size if count is not None and count < 0 else count
    logits = (mock_model.mock_logits(prompt[:i], vocab_size) for i in range(1, len(prompt)))
    entries = (logprobs_of(row, int(token_id), wanted) for row, token_id in zip(logits, prompt[1:], strict=True))
    return tuple(entry for entry in entries if entry is not None)
