"""OutputEnd: what ends an output, judged from its last token and its length.

For: sequences of the engine, and the adapter, which judges tokens that were generated before. Does not know: text, stop
strings. Invariant: the only place where a stop token and the limit of tokens end an output.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .infer_request import FinishReason, SamplingParams


def stop_token_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end an output: the model's end-of-sequence tokens, unless they are ignored, and the request's."""
    return frozenset((*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids))


def own_stop_token_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Of them, the request's: an end-of-sequence token is the model's also where the request names it (as in vLLM)."""
    return frozenset(sampling.stop_token_ids).difference(() if sampling.ignore_eos else eos_token_ids)


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """Numbers of tokens are of the output alone, or all of prompt and output: as its user counts."""

    stop_token_ids: frozenset[int]
    min_tokens: int
    """No stop token ends so many tokens."""
    max_tokens: int
    """So many tokens are the end."""

    def finish_reason(self, last_token_id: int, num_tokens: int) -> FinishReason | None:
        """Why `num_tokens` tokens with this last one are the whole output, if they are."""
        if last_token_id in self.stop_token_ids and num_tokens > self.min_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_tokens else None
