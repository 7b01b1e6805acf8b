"""Continuation: a request that goes on behind the tokens which its generation has sent before.

For: request conversion. Does not know: why the generation was interrupted, or who kept its tokens. Invariant: a request
goes on as the one that was interrupted would have, and sends only what that one had not sent; tokens that it cannot
have sent are refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy.typing as npt

from llmbackend.core.backend_api import TritonError, invalid_argument
from llmbackend.engine.messages import OutputEnd, StepOutput, stop_token_ids

from .schemas.sampling import GenerationParams
from .text.output_assembler import OutputAssembler

INPUT: Final = "prior_output_ids"
"""The input of the tokens."""


def prior_output(
    ids: npt.NDArray[Any], params: GenerationParams, *, is_seeded: bool, vocab_size: int, eos_token_ids: Collection[int]
) -> StepOutput:
    """The tokens `ids` as the output that they were, with the reason if they ended the generation.

    is_seeded: whether the request names its seed, without which it cannot draw the same tokens again.
    Raises TritonError INVALID_ARG naming the input.
    """
    sampling = params.sampling
    _check_reproducible(params, is_seeded)
    if ids.size > sampling.max_tokens:
        raise _refused(f"has {ids.size} tokens, expected at most {sampling.max_tokens}, those of max_tokens")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise _refused(f"holds {wrong[0]}, expected token ids from 0 to {vocab_size - 1}")
    token_ids = tuple(ids.tolist())
    end = OutputEnd(stop_token_ids(sampling, eos_token_ids), sampling.min_tokens, sampling.max_tokens)
    _check_nothing_behind_end(token_ids, end)
    reason = end.finish_reason(token_ids[-1], len(token_ids))
    return StepOutput("", token_ids, reason, token_ids[-1] if reason == "stop" else None)


def replay(prior: StepOutput, assembler: OutputAssembler) -> None:
    """Brings a new assembler to where it was behind the tokens: what they show is not shown again. Raises TritonError
    INVALID_ARG for tokens behind the end."""
    assembler.replay(prior)
    if assembler.num_tokens < len(prior.token_ids):
        raise _behind_end(assembler.num_tokens, "complete a stop string")


def _check_reproducible(params: GenerationParams, is_seeded: bool) -> None:
    if params.best_of > 1:
        raise _refused(f"is of one choice, expected 'n' and 'best_of' of 1, got {params.n} and {params.best_of}")
    if params.sampling.temperature > 0 and not is_seeded:
        raise invalid_argument(
            f"sampling parameter 'seed' is missing, expected the one that the tokens of '{INPUT}' were drawn with "
            f"(or a temperature of 0; it is {params.sampling.temperature})",
            param="seed",
        )


def _check_nothing_behind_end(token_ids: tuple[int, ...], end: OutputEnd) -> None:
    if end.stop_token_ids.isdisjoint(token_ids):
        return
    for index, token_id in enumerate(token_ids[:-1]):
        if end.finish_reason(token_id, index + 1) == "stop":
            raise _behind_end(index + 1, f"end with the stop token {token_id}")


def _behind_end(num_tokens: int, why: str) -> TritonError:
    return _refused(f"continues after the end of its generation: the first {num_tokens} tokens {why}")


def _refused(text: str) -> TritonError:
    return invalid_argument(f"input '{INPUT}' {text}", param=INPUT)
