"""Sampling of one step on the host: request parameters, bans of bad words, and logprobs of prompts.

Used by the host's runners, whose logits have various formats, and by accelerators (logprobs of prompts). How a token is
chosen is left to a `TokenChooser` (the native kernels, torch). Invariants: a row's token depends only on its logits,
its request and the tokens in its row; a broken row gets an error of its own; a step changes only KV slots, and every
edit is derived from the request and the row's tokens, so a step can be repeated. Logprobs of prompts are computed for a
few tokens at a time, so a long chunk never needs the logits of all its tokens at once. They depend, bit by bit, only on
the token's own logits: each is summed separately, on one thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..messages import BANNED_BIAS, InferRequest, TokenLogprobs
from ..step import BROKEN_LOGITS, Int32Array, RowTable, SampledTokens, StepPlan
from ..token_masks import BadWords, TokenMasks
from .rows import RowEdits, SampleLogprobs, SamplingRows, sampled_tokens

Int64Array = npt.NDArray[np.int64]
LogitsT = TypeVar("LogitsT")
_Logits = TypeVar("_Logits", contravariant=True)


class TokenChooser(Protocol[_Logits]):
    """Chooses tokens from logits of one format, by the parameters of the rows that it was made with."""

    def set_edits(self, row: int, edits: RowEdits | None) -> None:
        """The edits of the row have changed to these."""

    def sample(
        self, rows: Int32Array, positions: Int32Array, logits: _Logits, table: RowTable, masks: TokenMasks | None
    ) -> tuple[Int32Array, SampleLogprobs | None]:
        """As Sampler.sample: token ids (NO_TOKEN if logits are not finite) and, if any row requests them, logprobs."""

    def take(self, logits: _Logits, samples: Int64Array, token_ids: Int64Array) -> Float32Array:
        """Individual logits; samples and token_ids are broadcast to one shape."""


class Sampler(Generic[LogitsT]):
    def __init__(self, rows: SamplingRows, sampling: TokenChooser[LogitsT]) -> None:
        """rows: the parameters that `sampling` reads."""
        self._rows = rows
        self._sampling = sampling
        self._bad_words: dict[int, tuple[BadWords, dict[int, float]]] = {}
        """By row: its bad words, and the bias of its request."""
        self._logprob_token_ids: dict[int, list[int]] = {}
        """By row, for rows that request logprobs of given tokens."""

    def add_row(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming field, value and what was expected."""
        self._rows.add(row, request)
        self._bad_words.pop(row, None)
        if words := request.sampling.bad_words:
            self._bad_words[row] = BadWords(words), request.sampling.logit_bias
        self._logprob_token_ids.pop(row, None)
        if request.sampling.logprob_token_ids:
            self._logprob_token_ids[row] = list(request.sampling.logprob_token_ids)
        self._tell_edits(row)

    def remove_row(self, row: int) -> None:
        self._rows.remove(row)
        self._logprob_token_ids.pop(row, None)
        self._bad_words.pop(row, None)
        self._tell_edits(row)

    def sample(
        self, rows: Int32Array, positions: Int32Array, logits: LogitsT, table: RowTable, masks: TokenMasks | None = None
    ) -> SampledTokens:
        """The token at each (row, position) from logits [len(rows), at least vocab_size], which are not modified. A row
        with drafts occurs several times in succession, with ascending positions; rows with bad words have no drafts."""
        if self._bad_words:
            self._ban(rows, positions, table)
        sampled = sampled_tokens(rows, *self._sampling.sample(rows, positions, logits, table, masks))
        return self._with_others(sampled, rows, logits) if self._logprob_token_ids else sampled

    def _with_others(self, sampled: SampledTokens, rows: Int32Array, logits: LogitsT) -> SampledTokens:
        """Adds the logprobs of given tokens that rows request; their normaliser follows from the sampled token's
        logprob."""
        logprobs = dict(sampled.logprobs)
        for row, token_ids in self._logprob_token_ids.items():
            if row in logprobs:
                entries, samples = logprobs[row], np.flatnonzero(rows == row)
                columns = self._sampling.take(logits, samples[:, None], np.array(token_ids, np.int64)[None])
                own_ids = np.array([max(entry.token_id, 0) for entry in entries], np.int64)
                own = self._sampling.take(logits, samples, own_ids)
                logprobs[row] = [
                    _with_logprobs(entry, token_ids, values, float(logit))
                    for entry, values, logit in zip(entries, columns, own, strict=True)
                ]
        return replace(sampled, logprobs=logprobs)

    def _ban(self, rows: Int32Array, positions: Int32Array, table: RowTable) -> None:
        """Updates the bias of rows with bad words for this step."""
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            if row in self._bad_words:
                words, bias = self._bad_words[row]
                bans = dict.fromkeys(words.banned(table.token_ids[row, :position]), BANNED_BIAS)
                self._rows.edits[row] = self._rows.edits[row].with_bias({**bias, **bans})
                self._tell_edits(row)

    def _tell_edits(self, row: int) -> None:
        self._sampling.set_edits(row, self._rows.edits.get(row))


def _with_logprobs(entry: TokenLogprobs, token_ids: Sequence[int], logits: Float32Array, own: float) -> TokenLogprobs:
    """logits [token_ids]: of these tokens; own: of the sampled one."""
    norm = own - entry.logprob
    others = tuple((token_id, float(value) - norm) for token_id, value in zip(token_ids, logits, strict=True))
    return msgspec.structs.replace(entry, others=others)


_LogitsOut = TypeVar("_LogitsOut", covariant=True)


class Forward(Protocol[_LogitsOut]):
    """A loaded model with its KV memory: tokens to logits."""

    def logits(self, plan: StepPlan, table: RowTable) -> _LogitsOut | None:
        """Computes the plan's tokens and writes their KV; logits [plan.num_samples, vocab], or None if that is 0."""

    def logits_behind(self, row: int, positions: Int32Array) -> Float32Array:
        """Logits [positions, at least vocab] after these tokens of a row of the last step; valid until the next call.
        At most PIECE_TOKENS positions."""


class HostSteps(Generic[LogitsT]):
    def __init__(self, forward: Forward[LogitsT], sampler: Sampler[LogitsT], vocab_size: int) -> None:
        self._forward, self._sampler, self._vocab_size = forward, sampler, vocab_size

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        """As Runner.execute."""
        start_s = time.perf_counter()
        logits = self._forward.logits(plan, table)
        forward_s = time.perf_counter() - start_s
        sampled = SampledTokens(np.empty(0, np.int32))
        masks = None if plan.masks is None else plan.masks.result()
        if logits is not None:
            sampled = self._sampler.sample(*plan.samples(table), logits, table, masks)
        if spans := prompt_spans(plan, table):
            sampled = self._with_prompt_logprobs(sampled, spans, table)
        sample_s = time.perf_counter() - start_s - forward_s
        return dataclasses.replace(sampled, forward_s=forward_s, sample_s=sample_s)

    def _with_prompt_logprobs(
        self, sampled: SampledTokens, spans: Sequence[PromptSpan], table: RowTable
    ) -> SampledTokens:
        def logits_of(row: int, positions: Int32Array) -> Float32Array:
            return self._forward.logits_behind(row, positions)[:, : self._vocab_size]

        prompt_logprobs, errors = logprobs_of_spans(spans, table, logits_of)
        return dataclasses.replace(sampled, prompt_logprobs=prompt_logprobs, errors={**sampled.errors, **errors})


Float32Array = npt.NDArray[np.float32]
PIECE_TOKENS = 8
"""Tokens whose logits are in memory at once."""
_BLOCK_TOKENS = 64
"""Size of the vocabulary blocks that are compared by their most likely token."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens of a row whose logprobs a step returns: positions first to end - 1, from the logits after the
    tokens before them.

    count  number of top logprobs per position
    """

    row: int
    first: int
    end: int
    count: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The span in pieces of at most PIECE_TOKENS: (first, end)."""
        for first in range(self.first, self.end, PIECE_TOKENS):
            yield first, min(first + PIECE_TOKENS, self.end)


def prompt_spans(plan: StepPlan, table: RowTable) -> list[PromptSpan]:
    """What the plan's rows need. Must be read before the table is updated."""
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
    """By row: the logprobs of its span, or an error if its logits are not finite; minus infinity is an impossible
    token, as in samples.

    logits_of: logits [positions, at least vocab] after the tokens of a row at these positions
    """
    found: dict[int, list[TokenLogprobs]] = {}
    errors: dict[int, str] = {}
    for span in spans:
        entries: list[TokenLogprobs] = []
        for first, end in span.pieces():
            logits = logits_of(span.row, np.arange(first - 1, end - 1, dtype=np.int32))
            token_ids = table.token_ids[span.row, first:end].tolist()
            entries += [token_logprobs(own, one, span.count) for own, one in zip(logits, token_ids, strict=True)]
        if any(np.isnan(entry.logprob) for entry in entries):
            errors[span.row] = BROKEN_LOGITS
        else:
            found[span.row] = entries
    return found, errors


def token_logprobs(logits: Float32Array, token_id: int, count: int) -> TokenLogprobs:
    """The logprob and rank of a token, and the `count` most likely tokens, equal ones in the order of their ids. logits
    [vocab]: of one token. The logprob is NaN if one of them is NaN or infinity, or all are minus infinity."""
    peak = logits.max()
    with np.errstate(invalid="ignore"):  # infinities
        norm = peak + np.float32(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    own = logits[token_id]
    best = _likeliest(logits, count) if count else np.empty(0, np.int64)
    top = tuple(zip(best.tolist(), (logits[best] - norm).tolist(), strict=True))
    return TokenLogprobs(token_id, float(own - norm), int(np.count_nonzero(logits > own)) + 1, top)


def _likeliest(logits: Float32Array, count: int) -> npt.NDArray[np.int64]:
    num_blocks = len(logits) // _BLOCK_TOKENS
    if count >= num_blocks:
        return np.argsort(-logits, kind="stable")[:count]
    # Let b be the block maximum that ranks `count`-th among all blocks: at least `count` tokens have logits of at least
    # b.
    peaks = logits[: num_blocks * _BLOCK_TOKENS].reshape(num_blocks, _BLOCK_TOKENS).max(axis=1)
    least = np.partition(peaks, num_blocks - count)[num_blocks - count]
    candidates = np.flatnonzero(logits >= least)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]
