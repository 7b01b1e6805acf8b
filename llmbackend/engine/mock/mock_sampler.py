"""Every sampling parameter in plain numpy, one row at a time.

For: the mock model and the oracle of its tests. Does not know: rows, steps, KV. Invariant: the token depends on the
logits, the parameters, the row's own tokens and (seed, position) alone. The order is vLLM's: logprobs of the raw
distribution, then logit bias, min_tokens, penalties, temperature, min_p, top_k, top_p, draw.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from llmbackend.engine.infer_request import BANNED_BIAS, SamplingParams, TokenLogprobs
from llmbackend.engine.sampling.bad_words import BadWords
from llmbackend.engine.sampling.random_numbers import uniform
from llmbackend.engine.step import Int32Array

FloatArray = npt.NDArray[np.float64]


def _uniform(seed: int, position: int) -> float:
    """One number in [0, 1) for the token at `position`."""
    seeds, positions = np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64), np.array([position], np.uint64)
    return float(uniform(seeds, positions)[0])


def sample(
    logits: FloatArray,
    token_ids: Int32Array,
    num_prompt_tokens: int,
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
) -> tuple[int, TokenLogprobs | None]:
    """The token at position len(token_ids), given logits float64 [vocab_size] and the tokens so far, int32 [n]."""
    processed = logits.copy()
    for token_id, bias in sampling.logit_bias.items():
        processed[token_id] += bias
    if sampling.bad_words:
        processed[BadWords(sampling.bad_words).banned(token_ids)] += BANNED_BIAS
    if len(token_ids) - num_prompt_tokens < sampling.min_tokens:
        processed[list({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})] = -np.inf
    _penalise(processed, token_ids, num_prompt_tokens, sampling)
    if sampling.temperature < 1e-5:
        token_id = int(processed.argmax())
    else:
        token_id = _draw(processed / sampling.temperature, sampling, _uniform(sampling.seed, len(token_ids)))
    return token_id, _logprobs(logits, token_id, sampling.logprobs)


def _penalise(logits: FloatArray, token_ids: Int32Array, num_prompt_tokens: int, sampling: SamplingParams) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(token_ids)
        penalty = min(max(sampling.repetition_penalty, 1e-6), 1e6)  # so that logits stay finite
        factor = np.where(logits[seen] > 0, 1.0 / penalty, penalty)
        logits[seen] *= factor
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.bincount(token_ids[num_prompt_tokens:], minlength=len(logits))
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _draw(logits: FloatArray, sampling: SamplingParams, u: float) -> int:
    """The token whose share of the cumulated probability holds `u`, most likely tokens first."""
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(logits[order] - logits[order[0]])
    probs[probs < sampling.min_p] = 0.0
    if sampling.top_k > 0:
        probs[sampling.top_k :] = 0.0
    probs /= probs.sum()
    probs[np.cumsum(probs) - probs >= sampling.top_p] = 0.0
    cumulated = np.cumsum(probs)
    return int(order[min(np.searchsorted(cumulated, u * cumulated[-1], side="right"), np.count_nonzero(probs) - 1)])


def _logprobs(logits: FloatArray, token_id: int, count: int | None) -> TokenLogprobs | None:
    if count is None:
        return None
    logprobs = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    best = np.argsort(-logprobs, kind="stable")[:count]
    rank = 1 + int((logprobs > logprobs[token_id]).sum())
    return TokenLogprobs(token_id, float(logprobs[token_id]), rank, tuple((int(i), float(logprobs[i])) for i in best))
