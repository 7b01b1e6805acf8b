"""Finding any of many patterns in a sequence that arrives symbol by symbol.

For: stop strings (characters) and stop sequences (token ids). Does not know: requests, how text is shown. Invariant:
the state after any input is the longest suffix of it that begins a pattern; the input's pieces do not matter.
The automaton is Aho and Corasick's, but a state is made when the input first reaches it: the sorted patterns are the
trie, and a binary search tells whether a sequence begins one. So nothing is built in advance, a request that waits
holds its patterns alone, and a symbol costs a dictionary lookup, or amortised a constant number of binary searches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Generic, TypeVar

Symbols = TypeVar("Symbols", str, tuple[int, ...])


class State(Generic[Symbols]):
    """prefix: what the input ends with. match: the longest pattern that the input ends with. next: the states that were
    reached from here, by symbol. fallback: the state of the longest shorter suffix; None at the root."""

    __slots__ = ("fallback", "match", "next", "prefix")

    def __init__(self, prefix: Symbols, fallback: State[Symbols] | None = None, match: Symbols | None = None) -> None:
        self.prefix: Symbols = prefix
        self.fallback: State[Symbols] | None = fallback
        self.match: Symbols | None = match
        self.next: dict[Symbols, State[Symbols]] = {}


class StopAutomaton(Generic[Symbols]):
    """Not for several threads: it grows as it is used."""

    def __init__(self, patterns: Iterable[Symbols], empty: Symbols) -> None:
        """`patterns`: none of them `empty`, the sequence of no symbols."""
        self._patterns: list[Symbols] = sorted(patterns)
        self.root: State[Symbols] = State(empty)

    def step(self, state: State[Symbols], symbol: Symbols) -> State[Symbols]:
        """The state after one more symbol, given as a sequence of one."""
        known = state.next.get(symbol)
        return self._reach(state, symbol) if known is None else known

    def _reach(self, state: State[Symbols], symbol: Symbols) -> State[Symbols]:
        """Makes the way from `state`, and from those it falls back to, as far as it is not known."""
        unknown: list[State[Symbols]] = []
        at: State[Symbols] | None = state
        while at is not None and symbol not in at.next:
            unknown.append(at)
            at = at.fallback
        reached = None if at is None else at.next[symbol]
        for source in reversed(unknown):
            reached = self._made(source.prefix + symbol, reached)
            source.next[symbol] = reached
        assert reached is not None
        return reached

    def _made(self, prefix: Symbols, shorter: State[Symbols] | None) -> State[Symbols]:
        """The state of `prefix` if it begins a pattern, else `shorter`, the next one that does."""
        fallback = shorter or self.root
        index = bisect_left(self._patterns, prefix)
        found = self._patterns[index] if index < len(self._patterns) else self.root.prefix
        if found[: len(prefix)] != prefix:
            return fallback
        return State(prefix, fallback, prefix if found == prefix else fallback.match)
