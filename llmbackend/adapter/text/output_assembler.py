"""Assembles an engine's outputs for the client: text, token ids, logprobs and finish reason, cut at the same position.

For one generation's outputs, streamed or not. Independent of Triton and of other requests. Invariants: all chunks
together have the same text, ids and logprobs, however the output was divided into steps and however often chunks were
taken; the cost per symbol of finding stop strings and sequences does not depend on the output's length or their number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from llmbackend.engine.messages import FinishReason, StepOutput, TokenLogprobs

from .tokenizer import Detokenizer

HELD_BACK = -1
"""Token id of a text that came from earlier tokens and was held back until a special token or the end."""
IN_REASONING = -2
"""Token id of the first entry: the marker of the reasoning within which the prompt ends."""
TextToken = tuple[int, str, bool]
"""(token id, HELD_BACK or IN_REASONING; the text that it added to the output; whether it is a special token)"""


class Chunk(msgspec.Struct):
    """The output since the last chunk was taken. A Struct, because one is created per token."""

    text: list[str] = []
    """Parts to be joined."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """One per token, or empty."""
    finish_reason: FinishReason | None = None
    """Set only in the last chunk."""
    stop_reason: int | str | None = None
    """In the last chunk: the stop string, or the request's own stop token, that ended it, if any. vLLM's name."""
    ends_with_stop_token: bool = False
    """Whether the last token is the end-of-sequence or stop token that ended the generation."""
    text_tokens: list[TextToken] = []
    """All tokens with their text, if requested. Text that precedes a special token is in an earlier entry."""


class OutputAssembler:
    """Owner: its InferTask. For the loop of the task's engine.

    A stop string cuts the text; the tokens up to and including the one that completed it are kept (as in vLLM). A stop
    sequence of token ids cuts nothing. An end-of-sequence or stop token is kept as a token, and adds text only with
    include_stop_str_in_output. With text tokens, a special token releases the text held back before it and its own,
    because no character or stop string can span it; it has its own text there, even if other text omits it.
    """

    __slots__ = (
        "_detokenizer", "_is_plain", "_min_tokens", "_own_stop_token_ids", "_sequences", "_show_stop_token",
        "_special_text", "_stop", "chunk", "cumulative_logprob", "finish_reason", "num_tokens",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        stop_sequences: Sequence[tuple[int, ...]] = (),
        *,
        include_stop_str_in_output: bool = False,
        hides_stop_token: bool = False,
        min_tokens: int = 0,
        special_text: Callable[[int], str | None] | None = None,
        prompt_marker: str | None = None,
        own_stop_token_ids: Collection[int] = (),
    ) -> None:
        """stop: strings that end the generation
        stop_sequences: sequences of token ids that end it
        include_stop_str_in_output: whether the text retains the stop string or token that ended it
        hides_stop_token: whether it retains stop strings only
        min_tokens: stop strings that are complete within the text of this many tokens are ignored
        special_text: the text of a special token, None for any other token; without it, no text tokens are produced
        prompt_marker: the marker of the reasoning within which the prompt ends, for the first text token
        own_stop_token_ids: those that are reported as `stop_reason`
        """
        self._detokenizer = detokenizer
        self._is_plain = not stop and not stop_sequences and special_text is None
        """Whether text is never held back before the end."""
        self._stop = StopStrings(stop, include_stop_str_in_output)
        self._sequences = StopSequences(stop_sequences)
        self._min_tokens = min_tokens if stop else 0
        self._show_stop_token = include_stop_str_in_output and not hides_stop_token
        self._special_text = special_text
        self._own_stop_token_ids = own_stop_token_ids
        self.chunk = Chunk()
        """The output that has not been taken yet."""
        if prompt_marker is not None:
            self.chunk.text_tokens.append((IN_REASONING, prompt_marker, True))
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None

    def push(self, output: StepOutput) -> tuple[int, ...]:
        """Adds one step's output. Returns the tokens that belong to the request.

        Sets `finish_reason`; to "stop" even if a stop string or sequence ended the request before the engine did.
        """
        ids = output.token_ids
        if self._is_plain and output.finish_reason is None:
            chunk = self.chunk
            for token_id in ids:
                if text := self._detokenizer.push(token_id):
                    chunk.text.append(text)
            chunk.token_ids.extend(ids)
            self.num_tokens += len(ids)
            if output.logprobs:
                self._add_logprobs(output.logprobs)
            return ids
        for index, token_id in enumerate(ids):
            is_stop_token = output.stop_token_id is not None and index == len(ids) - 1
            is_shown = not is_stop_token or self._show_stop_token
            if self._special_text is not None:
                self._push_text_token(self._special_text(token_id), token_id, is_shown, self.num_tokens + index + 1)
            elif is_shown:
                self._show(self._detokenizer.push(token_id), self.num_tokens + index + 1)
            if self._stop.matched is not None or self._sequences.push(token_id):
                self._flush(self.num_tokens + index + 1)
                return self._keep(output, ids[: index + 1], "stop")
        if output.finish_reason is not None:
            self._flush(self.num_tokens + len(ids))
        reason: FinishReason | None = "stop" if self._stop.matched is not None else output.finish_reason
        self.chunk.ends_with_stop_token = reason is not None and output.stop_token_id is not None
        if reason == "stop" and self._stop.matched is None and output.stop_token_id in self._own_stop_token_ids:
            self.chunk.stop_reason = output.stop_token_id
        return self._keep(output, ids, reason)

    def replay(self, output: StepOutput) -> None:
        """Like `push`, for tokens that the client already has: the chunk contains only their finish reason."""
        self.push(output)
        shown = self.take()
        self.chunk.finish_reason, self.chunk.stop_reason = shown.finish_reason, shown.stop_reason
        self.chunk.ends_with_stop_token = shown.ends_with_stop_token

    def take(self) -> Chunk:
        """The current chunk; a new one begins."""
        chunk, self.chunk = self.chunk, Chunk()
        return chunk

    def _push_text_token(self, special_text: str | None, token_id: int, is_shown: bool, num_tokens: int) -> None:
        if special_text is not None:
            self._flush(num_tokens - 1)
            if self._stop.matched is not None:
                return
        shown = self._show(self._detokenizer.push(token_id), num_tokens) if is_shown else ""
        if special_text is not None and is_shown and self._stop.matched is None:
            self._append(self._stop.flush())
            shown = special_text
        self.chunk.text_tokens.append((token_id, shown, special_text is not None))

    def _show(self, text: str, num_tokens: int) -> str:
        """Returns what may be shown of the held-back text followed by `text`."""
        return self._append(self._stop.push(text, may_end=num_tokens > self._min_tokens)) if text else ""

    def _flush(self, num_tokens: int) -> None:
        """Shows the held-back text, unless a stop string has cut it off."""
        if self._stop.matched is None:
            shown = self._show(self._detokenizer.flush(), num_tokens)
            if self._stop.matched is None:
                shown += self._append(self._stop.flush())
            if shown and self._special_text is not None:
                self.chunk.text_tokens.append((HELD_BACK, shown, False))

    def _append(self, text: str) -> str:
        if text:
            self.chunk.text.append(text)
        return text

    def _add_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        self.chunk.logprobs.extend(logprobs)
        self.cumulative_logprob += sum(entry.logprob for entry in logprobs)

    def _keep(self, output: StepOutput, ids: tuple[int, ...], reason: FinishReason | None) -> tuple[int, ...]:
        self.chunk.token_ids.extend(ids)
        if output.logprobs:
            self._add_logprobs(output.logprobs[: len(ids)])
        self.num_tokens += len(ids)
        self.finish_reason = self.chunk.finish_reason = reason
        if self._stop.matched is not None:
            self.chunk.stop_reason = self._stop.matched
        return ids


Symbols = TypeVar("Symbols", str, tuple[int, ...])


class State(Generic[Symbols]):
    """The longest suffix of the input that begins a pattern."""

    __slots__ = ("fallback", "match", "next", "prefix")

    def __init__(self, prefix: Symbols, fallback: State[Symbols] | None = None, match: Symbols | None = None) -> None:
        self.prefix: Symbols = prefix
        """That suffix."""
        self.fallback: State[Symbols] | None = fallback
        """The state of the next shorter suffix; None at the root."""
        self.match: Symbols | None = match
        """The longest pattern with which the input ends."""
        self.next: dict[Symbols, State[Symbols]] = {}
        """States reached from here so far, by symbol."""


class StopAutomaton(Generic[Symbols]):
    """Finds any of many patterns in a sequence that arrives symbol by symbol. Not thread-safe.

    An Aho-Corasick automaton whose states are created only when the input reaches them: a binary search in the sorted
    patterns tells whether one begins with a given sequence. A waiting request thus stores only its patterns, and a
    symbol costs a dictionary lookup or, amortised, a constant number of binary searches.
    """

    def __init__(self, patterns: Iterable[Symbols], empty: Symbols) -> None:
        """empty: the empty sequence, which must not be among `patterns`."""
        self._patterns: list[Symbols] = sorted(patterns)
        self.root: State[Symbols] = State(empty)

    def step(self, state: State[Symbols], symbol: Symbols) -> State[Symbols]:
        """The state after one more symbol, given as a sequence of length one."""
        known = state.next.get(symbol)
        return self._reach(state, symbol) if known is None else known

    def _reach(self, state: State[Symbols], symbol: Symbols) -> State[Symbols]:
        """Creates the missing transitions for `symbol` from `state` and its fallbacks."""
        unknown: list[State[Symbols]] = []
        at: State[Symbols] | None = state
        while at is not None and symbol not in at.next:
            unknown.append(at)
            at = at.fallback
        reached = None if at is None else at.next[symbol]
        for source in reversed(unknown):
            reached = self._make(source.prefix + symbol, reached)
            source.next[symbol] = reached
        assert reached is not None
        return reached

    def _make(self, prefix: Symbols, shorter: State[Symbols] | None) -> State[Symbols]:
        """The state of `prefix` if a pattern begins with it, else `shorter`, that of the longest such suffix."""
        fallback = shorter or self.root
        index = bisect_left(self._patterns, prefix)
        found = self._patterns[index] if index < len(self._patterns) else self.root.prefix
        if found[: len(prefix)] != prefix:
            return fallback
        return State(prefix, fallback, prefix if found == prefix else fallback.match)


class StopStrings:
    """Cuts one generation's text at a stop string. Owner: its OutputAssembler.

    The stop string completed first ends the text; of several completed by the same character, the longest one. Text is
    held back while a stop string may begin with it.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """stop: non-empty strings; if there are none, all text passes immediately."""
        self._automaton: StopAutomaton[str] | None = StopAutomaton(stop, "") if stop else None
        self._state = self._automaton.root if self._automaton is not None else None
        self._include = include_stop_str_in_output
        self.matched: str | None = None
        """The stop string that ended the text; nothing may be pushed afterwards."""

    def push(self, text: str, may_end: bool = True) -> str:
        """The text that may be shown now. Sets `matched` when a stop string is complete. may_end: False = those that
        are complete in this text are ignored, but one may begin in it."""
        automaton, state = self._automaton, self._state
        if automaton is None or state is None or not text:
            return text
        buffer = state.prefix + text
        held = len(state.prefix)
        for end, character in enumerate(text, held + 1):
            state = state.next.get(character) or automaton.step(state, character)
            if may_end and state.match is not None:
                self.matched = state.match
                self._state = automaton.root
                return buffer[: end if self._include else end - len(state.match)]
        self._state = state
        return buffer[: len(buffer) - len(state.prefix)]

    def flush(self) -> str:
        """The held-back text, if the generation ended for another reason."""
        if self._automaton is None or self._state is None:
            return ""
        held, self._state = self._state.prefix, self._automaton.root
        return held


class StopSequences:
    """Ends one generation at a sequence of token ids. Owner: its OutputAssembler."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """sequences: non-empty; if there are none, nothing matches."""
        self._automaton = StopAutomaton(sequences, ())
        self._state = self._automaton.root
        self._is_idle = not sequences

    def push(self, token_id: int) -> bool:
        """Whether this token completes a sequence."""
        if self._is_idle:
            return False
        self._state = self._automaton.step(self._state, (token_id,))
        return self._state.match is not None
