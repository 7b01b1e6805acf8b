"""Which tokens one request may get next: its grammar, its reasoning, its allowed and forbidden tokens.

Used by constraints.py. Invariants: what is allowed is a function of the request and its tokens alone, so preemption,
restart and drafts need no special handling; a forced token is the only one allowed, even if it is not drafted; a mask
that allows no token is an error that names the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import numpy as np

from ..errors import BadInputError
from ..messages import BANNED_BIAS, InferRequest, ModelInfo, Reasoning, stop_token_ids
from ..token_masks import BadWords, Words, all_tokens, has, only
from .grammar_compiler import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Phase(Enum):
    START = auto()
    """The output may still begin with the start sequence."""
    REASONING = auto()
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of an output.

    phase
    num_matched    tokens at the output's end that match the beginning of the start (START) or end sequence (REASONING)
    num_reasoning  tokens of reasoning, without the start sequence
    """

    phase: Phase
    num_matched: int = 0
    num_reasoning: int = 0


ANSWERING = Progress(Phase.ANSWER)


def begin(reasoning: Reasoning | None) -> Progress:
    """Before the first output token."""
    if reasoning is None:
        return ANSWERING
    if reasoning.is_open:
        return Progress(Phase.REASONING)
    return Progress(Phase.START) if reasoning.start_token_ids else ANSWERING


def advance(reasoning: Reasoning, progress: Progress, token_id: int) -> Progress:
    """After one more output token."""
    if progress.phase is Phase.ANSWER:
        return progress
    if progress.phase is Phase.START:
        if token_id != reasoning.start_token_ids[progress.num_matched]:
            return ANSWERING
        num_matched = progress.num_matched + 1
        is_whole = num_matched == len(reasoning.start_token_ids)
        return Progress(Phase.REASONING) if is_whole else Progress(Phase.START, num_matched)
    num_matched = _matched(reasoning.end_token_ids, progress.num_matched, token_id)
    if num_matched == len(reasoning.end_token_ids):
        return ANSWERING
    return Progress(Phase.REASONING, num_matched, progress.num_reasoning + 1)


def forced_token(reasoning: Reasoning, progress: Progress) -> int | None:
    """The next token of the end sequence, once the reasoning limit has been reached."""
    limit = reasoning.max_tokens
    if progress.phase is not Phase.REASONING or limit is None or progress.num_reasoning < limit:
        return None
    return reasoning.end_token_ids[progress.num_matched]


def _matched(sequence: tuple[int, ...], num_matched: int, token_id: int) -> int:
    """How many tokens at the end of (sequence[:num_matched], token_id) match the beginning of the sequence."""
    text = (*sequence[:num_matched], token_id)
    return next(n for n in range(len(text), -1, -1) if text[len(text) - n :] == sequence[:n])


MAX_MARKER_TOKENS: Final = 64
"""Limit for the start and end sequence of reasoning."""


def is_constrained(request: InferRequest) -> bool:
    return bool(request.grammar or request.sampling.allowed_token_ids) or request.reasoning is not None


def refusal(request: InferRequest, vocab_size: int) -> str:
    """Why the request's constraints can never be satisfied, naming field and value; "" = they can."""
    allowed, marked = request.sampling.allowed_token_ids, request.reasoning
    for token_id in (min(allowed, default=0), max(allowed, default=0)):
        if not 0 <= token_id < vocab_size:
            return f"'allowed_token_ids' names token {token_id}, expected one from 0 to {vocab_size - 1}"
    if marked is None:
        return ""
    ids = (*marked.start_token_ids, *marked.end_token_ids)
    lengths = len(marked.start_token_ids), len(marked.end_token_ids)
    if not marked.end_token_ids or max(lengths) > MAX_MARKER_TOKENS or not 0 <= min(ids) <= max(ids) < vocab_size:
        return (
            f"'reasoning_markers' are {lengths[0]} and {lengths[1]} tokens, expected at most {MAX_MARKER_TOKENS} each "
            f"of a vocabulary of {vocab_size}, and at least one for the end"
        )
    if marked.max_tokens is not None and marked.max_tokens < 0:
        return f"'thinking_token_budget' is {marked.max_tokens}, expected at least 0"
    return ""


class RowConstraint:
    """Owns one request's matcher. One thread at a time uses it."""

    def __init__(self, request: InferRequest, info: ModelInfo, matcher: LLMatcher | None) -> None:
        """matcher: of request.grammar, in its initial state; None without a grammar."""
        sampling = request.sampling
        self._request, self._vocab_size = request, info.vocab_size
        self._matcher, self._reasoning = matcher, request.reasoning
        self._progress = begin(request.reasoning)
        self.num_output = 0
        """Output tokens consumed so far."""
        self.mask_s = 0.0
        """Seconds that each of its latest masks took; the scheduler limits their sum per step."""
        self._min_tokens = sampling.min_tokens
        self._eos = frozenset(info.eos_token_ids)
        self._stops = stop_token_ids(sampling, info.eos_token_ids)
        self._all = all_tokens(info.vocab_size)
        self._allowed = only(sampling.allowed_token_ids, info.vocab_size) if sampling.allowed_token_ids else None
        banned = [token_id for token_id, bias in sampling.logit_bias.items() if bias <= BANNED_BIAS]
        self._banned = self._without(banned)
        self._without_stops = self._without(self._stops)
        self._without_eos = self._without(self._eos)
        self._bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None

    @property
    def has_bad_words(self) -> bool:
        return self._bad_words is not None

    @property
    def has_grammar(self) -> bool:
        return self._matcher is not None

    def is_free(self, num_drafts: int) -> bool:
        """Whether all tokens are allowed at the next position and after each of `num_drafts` drafts."""
        if self._matcher is not None or self._allowed is not None:
            return False
        limit = None if self._reasoning is None else self._reasoning.max_tokens
        is_answering = self._progress.phase is Phase.ANSWER
        return is_answering or limit is None or self._progress.num_reasoning + num_drafts < limit

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consumes the next output tokens. Raises BadInputError if they violate the grammar."""
        for token_id in token_ids:
            self._consume(token_id)

    def masks(self, drafts: Sequence[int], words: Words, tokens: np.ndarray | None = None) -> list[str]:
        """Writes what is allowed after the known tokens, and after each draft, to words [1 + drafts, …]. Returns an
        error for each, "" = none. tokens int32 [n]: all known tokens, prompt included, if there are bad words."""
        progress, num_output, num_consumed = self._progress, self.num_output, 0
        errors = [self._mask(words[0], tokens)]
        for i, draft in enumerate(drafts):
            if not errors[-1] and has(words[i], draft) and draft not in self._stops:
                num_consumed += self._consume(draft)
                errors.append(self._mask(words[i + 1], None))
            else:  # what follows a forbidden draft is never read
                errors += ["the draft before it is not allowed"] * (len(drafts) - i)
                break
        self._restore(progress, num_output, num_consumed)
        return errors

    def forced(self, limit: int) -> list[int]:
        """The next tokens, up to `limit`, as long as each is the only one allowed."""
        marked, progress = self._reasoning, self._progress
        if self._is_restricted:
            return []
        if marked is not None and forced_token(marked, progress) is not None:
            return list(marked.end_token_ids[progress.num_matched :][:limit])
        if self._matcher is None or progress.phase is not Phase.ANSWER:
            return []
        return self._matcher.compute_ff_tokens()[:limit]

    def num_possible(self, drafts: Sequence[int]) -> int:
        """How many of the drafts, from the first on, grammar and reasoning allow."""
        progress, num_output, num_consumed, count = self._progress, self.num_output, 0, 0
        for draft in drafts:
            if not self._is_possible(draft):
                break
            count += 1
            if draft in self._stops:
                break
            num_consumed += self._consume(draft)
        self._restore(progress, num_output, num_consumed)
        return count

    # --- the state --------------------------------------------------------------------------------------------------

    def _consume(self, token_id: int) -> int:
        """Consumes one output token; returns how many tokens the matcher consumed."""
        self.num_output += 1
        before = self._progress
        if before.phase is Phase.ANSWER:
            return self._match([token_id])
        assert self._reasoning is not None
        after = self._progress = advance(self._reasoning, before, token_id)
        if before.phase is Phase.START and after.phase is Phase.ANSWER:
            return self._match([*self._reasoning.start_token_ids[: before.num_matched], token_id])
        return 0

    def _match(self, token_ids: list[int]) -> int:
        if self._matcher is None or token_ids[-1] in self._eos:
            return 0
        if not self._matcher.consume_tokens(token_ids):
            raise BadInputError(f"the tokens so far do not follow 'structured_outputs': {first_line(self._matcher)}")
        return len(token_ids)

    def _restore(self, progress: Progress, num_output: int, num_consumed: int) -> None:
        self._progress, self.num_output = progress, num_output
        if num_consumed:
            assert self._matcher is not None
            self._matcher.rollback(num_consumed)

    def _is_possible(self, token_id: int) -> bool:
        marked, progress = self._reasoning, self._progress
        if marked is not None and progress.phase is not Phase.ANSWER:
            forced = forced_token(marked, progress)
            return progress.phase is Phase.REASONING and (token_id == forced if forced is not None else True)
        if self._matcher is None or token_id in self._eos:
            return True
        return self._matcher.validate_tokens([token_id]) == 1

    # --- masks ------------------------------------------------------------------------------------------------------

    @property
    def _is_restricted(self) -> bool:
        """Whether the request forbids tokens that its grammar may force."""
        return self._allowed is not None or self._banned is not None or self._bad_words is not None

    def _mask(self, words: Words, tokens: np.ndarray | None) -> str:
        name = self._write(words)
        if self._matcher is not None and self._matcher.is_error():
            return f"'structured_outputs' can no longer be satisfied: {first_line(self._matcher)}"
        names = [name] if name else []
        for name, restriction in self._restrictions(tokens):
            names.append(name)
            words &= restriction
            if not words.any():
                return f"no token is left at position {self.num_output} of the output: {_joined(names)} exclude all"
        if not words.any():
            return f"no token is left at position {self.num_output} of the output: {_joined(names)} excludes all"
        return ""

    def _write(self, words: Words) -> str:
        """Writes what grammar and reasoning allow. Returns the field that restricts it, or ""."""
        marked, progress, matcher = self._reasoning, self._progress, self._matcher
        if marked is not None and progress.phase is Phase.REASONING:
            forced = forced_token(marked, progress)
            if forced is not None:
                words[:] = only([forced], self._vocab_size)
                return "'thinking_token_budget'"
            ends = None if matcher is None else self._without_eos  # the final answer follows
            words[:] = self._all if ends is None else ends
            return "'structured_outputs'" if matcher is not None else ""
        if matcher is None:
            words[:] = self._all
            return ""
        if progress.phase is Phase.START:
            assert marked is not None
            begun = list(marked.start_token_ids[: progress.num_matched])
            self._write_behind(matcher, begun, words)
            words |= only([marked.start_token_ids[progress.num_matched]], self._vocab_size)
        else:
            self._write_grammar(matcher, words)
        return "'structured_outputs'"

    def _write_behind(self, matcher: LLMatcher, begun: list[int], words: Words) -> None:
        """Writes what the grammar allows after tokens that also begin the start sequence."""
        if begun and matcher.validate_tokens(begun) < len(begun):
            words[:] = 0
            return
        if begun:
            matcher.consume_tokens(begun)
        self._write_grammar(matcher, words)
        if begun:
            matcher.rollback(len(begun))

    def _write_grammar(self, matcher: LLMatcher, words: Words) -> None:
        forced = () if self._is_restricted else matcher.compute_ff_tokens()
        if forced:
            words[:] = only(forced[:1], self._vocab_size)
            return
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        words &= self._all

    def _restrictions(self, tokens: np.ndarray | None) -> list[tuple[str, Words]]:
        """What else the request excludes here: the names of the fields, and what each leaves."""
        found: list[tuple[str, Words]] = []
        sampling = self._request.sampling
        if self._allowed is not None:
            found.append(("'allowed_token_ids'", self._allowed))
        if self._banned is not None:
            found.append(("'bad_words'", self._banned))
        if self._bad_words is not None and tokens is not None:
            words = self._without(self._bad_words.banned(tokens))
            found += [] if words is None else [("'bad_words'", words)]
        if sampling.ignore_eos and self._matcher is not None and self._without_eos is not None:
            found.append(("'ignore_eos'", self._without_eos))
        if self.num_output < self._min_tokens and self._without_stops is not None:
            found.append(("'min_tokens'", self._without_stops))
        return found

    def _without(self, token_ids: Sequence[int] | frozenset[int]) -> Words | None:
        inside = [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]
        return ~only(inside, self._vocab_size) if inside else None


def _joined(names: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(names))
