"""Logprobs of prompts: which tokens of a step's rows need them, and their values from logits.

For: the runners, which compute logits of a few tokens at a time, so that a long chunk never needs logits of all its
tokens at once. Does not know: models, devices, what a client asked for. Invariant: a token's logprobs depend on its own
logits alone, bit by bit: each is summed by itself, on one thread, whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..messages import TokenLogprobs
from ..step import BROKEN_LOGITS, Int32Array, RowTable, StepPlan

Float32Array = npt.NDArray[np.float32]
PIECE_TOKENS = 8
"""Tokens whose logits are in memory at once."""
_BLOCK_TOKENS = 64
"""Tokens of the vocabulary that are compared with others by their likeliest one."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Tokens of a row's prompt whose logprobs a step gives: those at positions first to end - 1, from the logits behind
    the tokens before them.

    count  how many of the likeliest tokens are asked for
    """

    row: int
    first: int
    end: int
    count: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The same in parts of at most PIECE_TOKENS: (first, end)."""
        for first in range(self.first, self.end, PIECE_TOKENS):
            yield first, min(first + PIECE_TOKENS, self.end)


def prompt_spans(plan: StepPlan, table: RowTable) -> list[PromptSpan]:
    """What the plan's rows need. Read before the table moves on."""
    if not table.prompt_logprobs:
        return []
    spans = []
    for row, scheduled in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True):
        if (wanted := table.prompt_logprobs.get(row)) is not None:
            computed = int(table.num_computed_tokens[row])
            first = max(computed + 1, wanted.first)
            end = min(computed + scheduled + 1, int(table.num_prompt_tokens[row]))
            if first < end:
                spans.append(PromptSpan(row, first, end, wanted.count))
    return spans


def logprobs_of_spans(
    spans: Sequence[PromptSpan], table: RowTable, logits_of: Callable[[int, Int32Array], Float32Array]
) -> tuple[dict[int, list[TokenLogprobs]], dict[int, str]]:
    """By row: the logprobs of its span, or the error of one whose logits are not finite.

    logits_of: logits [positions, vocab or more] behind the tokens of a row at these positions
    """
    found: dict[int, list[TokenLogprobs]] = {}
    errors: dict[int, str] = {}
    for span in spans:
        entries: list[TokenLogprobs] = []
        for first, end in span.pieces():
            logits = logits_of(span.row, np.arange(first - 1, end - 1, dtype=np.int32))
            token_ids = table.token_ids[span.row, first:end].tolist()
            entries += [token_logprobs(own, one, span.count) for own, one in zip(logits, token_ids, strict=True)]
        if all(np.isfinite(entry.logprob) for entry in entries):
            found[span.row] = entries
        else:
            errors[span.row] = BROKEN_LOGITS
    return found, errors


def token_logprobs(logits: Float32Array, token_id: int, count: int) -> TokenLogprobs:
    """The logprob and rank of a token, and the `count` likeliest tokens; equal ones in the order of their ids. logits
    [vocab]: of one token."""
    peak = logits.max()
    norm = peak + np.float32(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    own = logits[token_id]
    best = _likeliest(logits, count) if count else np.empty(0, np.int64)
    top = tuple(zip(best.tolist(), (logits[best] - norm).tolist(), strict=True))
    return TokenLogprobs(token_id, float(own - norm), int(np.count_nonzero(logits > own)) + 1, top)


def _likeliest(logits: Float32Array, count: int) -> npt.NDArray[np.int64]:
    num_blocks = len(logits) // _BLOCK_TOKENS
    if count >= num_blocks:
        return np.argsort(-logits, kind="stable")[:count]
    # At least `count` tokens are as likely as the last of the `count` likeliest blocks' likeliest tokens.
    peaks = logits[: num_blocks * _BLOCK_TOKENS].reshape(num_blocks, _BLOCK_TOKENS).max(axis=1)
    least = np.partition(peaks, num_blocks - count)[num_blocks - count]
    candidates = np.flatnonzero(logits >= least)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]
