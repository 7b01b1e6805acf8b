"""Finding stop strings and stop sequences of token ids in output that arrives in pieces.

For: the output assembler. Does not know: requests, detokenisation. Invariant: where a generation ends, and what text is
shown before that, do not depend on how the output was cut into pieces; the cost per symbol grows neither with the
length of the output nor with the number of patterns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Symbols = TypeVar("Symbols", str, tuple[int, ...])


class State(Generic[Symbols]):
    """The longest suffix of the input that begins a pattern."""

    __slots__ = ("fallback", "match", "next", "prefix")

    def __init__(self, prefix: Symbols, fallback: State[Symbols] | None = None, match: Symbols | None = None) -> None:
        self.prefix: Symbols = prefix
        """That suffix."""
        self.fallback: State[Symbols] | None = fallback
        """The state of the longest shorter suffix; None at the root."""
        self.match: Symbols | None = match
        """The longest pattern that the input ends with."""
        self.next: dict[Symbols, State[Symbols]] = {}
        """The states that were reached from here, by symbol."""


class StopAutomaton(Generic[Symbols]):
    """Finds any of many patterns in a sequence that arrives symbol by symbol. For one thread: it grows as it is used.

    The automaton is Aho and Corasick's, but a state is made when the input first reaches it: the sorted patterns are
    the trie, and a binary search tells whether a sequence begins one. So a waiting request holds only its patterns, and
    a symbol costs a dictionary lookup, or amortised a constant number of binary searches.
    """

    def __init__(self, patterns: Iterable[Symbols], empty: Symbols) -> None:
        """empty: the sequence of no symbols, which must not be among `patterns`."""
        self._patterns: list[Symbols] = sorted(patterns)
        self.root: State[Symbols] = State(empty)

    def step(self, state: State[Symbols], symbol: Symbols) -> State[Symbols]:
        """The state after one more symbol, given as a sequence of one."""
        known = state.next.get(symbol)
        return self._reach(state, symbol) if known is None else known

    def _reach(self, state: State[Symbols], symbol: Symbols) -> State[Symbols]:
        """Makes the missing transitions from `state` and its fallbacks for `symbol`."""
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
        """The state of `prefix` if it begins a pattern, else `shorter`, that of the longest suffix that does."""
        fallback = shorter or self.root
        index = bisect_left(self._patterns, prefix)
        found = self._patterns[index] if index < len(self._patterns) else self.root.prefix
        if found[: len(prefix)] != prefix:
            return fallback
        return State(prefix, fallback, prefix if found == prefix else fallback.match)


class StopStrings:
    """Cuts one generation's text at its stop string, and never shows a part of one. Owner: its OutputAssembler.

    The stop string that is completed first ends the text; of several completed by the same character, the longest. Text
    is held back only as long as it is a proper prefix of a stop string.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """stop: non-empty strings; without any, all text passes at once."""
        self._automaton: StopAutomaton[str] | None = StopAutomaton(stop, "") if stop else None
        self._state = self._automaton.root if self._automaton is not None else None
        self._include = include_stop_str_in_output
        self.matched: str | None = None
        """The stop string that ended the text; nothing may be pushed afterwards."""

    def push(self, text: str) -> str:
        """The text that may be shown now. Sets `matched` when a stop string is complete."""
        automaton, state = self._automaton, self._state
        if automaton is None or state is None or not text:
            return text
        buffer = state.prefix + text
        held = len(state.prefix)
        for end, character in enumerate(text, held + 1):
            state = state.next.get(character) or automaton.step(state, character)
            if state.match is not None:
                self.matched = state.match
                self._state = automaton.root
                return buffer[: end if self._include else end - len(state.match)]
        self._state = state
        return buffer[: len(buffer) - len(state.prefix)]

    def flush(self) -> str:
        """The text held back, when the generation ended for another reason."""
        if self._automaton is None or self._state is None:
            return ""
        held, self._state = self._state.prefix, self._automaton.root
        return held


class StopSequences:
    """Ends one generation at a sequence of generated token ids. Owner: its OutputAssembler."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """sequences: non-empty ones; without any, nothing matches."""
        self._automaton = StopAutomaton(sequences, ())
        self._state = self._automaton.root
        self._is_idle = not sequences

    def push(self, token_id: int) -> bool:
        """Whether a sequence ends with this token."""
        if self._is_idle:
            return False
        self._state = self._automaton.step(self._state, (token_id,))
        return self._state.match is not None
