"""The automaton behind stop strings and stop sequences: what it finds, and that a symbol's cost is bounded."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmbackend.adapter.stop_automaton import State, StopAutomaton

LETTERS = st.text(alphabet="abc", min_size=1, max_size=5)


@given(patterns=st.sets(LETTERS, min_size=1, max_size=12), text=st.text(alphabet="abc", max_size=40))
def test_the_state_is_the_longest_open_prefix_and_knows_the_longest_match(patterns: set[str], text: str) -> None:
    automaton = StopAutomaton(patterns, "")
    state = automaton.root
    for end in range(1, len(text) + 1):
        state = automaton.step(state, text[end - 1])
        suffixes = [text[start:end] for start in range(end + 1)]
        assert state.prefix == next(one for one in suffixes if any(p.startswith(one) for p in patterns))
        assert state.match == max((p for p in patterns if text[:end].endswith(p)), key=len, default=None)


class Counted(str):
    """A pattern that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: Any) -> bool:
        Counted.comparisons += 1
        return str.__lt__(self, other)


def comparisons_per_symbol(patterns: list[str], text: str) -> float:
    automaton = StopAutomaton([Counted(pattern) for pattern in patterns], "")
    Counted.comparisons = 0
    state: State[str] = automaton.root
    for character in text:
        state = automaton.step(state, character)
    return Counted.comparisons / len(text)


def test_a_symbols_cost_does_not_grow_with_the_patterns() -> None:
    draw = random.Random(0)
    patterns = ["".join(draw.choices("QXZJKVW#@", k=20)) for _ in range(20_000)]
    echoed = "".join(pattern[:-1] for pattern in patterns[:100])
    assert comparisons_per_symbol(patterns, "The quick brown fox " * 100) < 1
    assert comparisons_per_symbol(patterns, echoed) < 5 * 15  # a few binary searches


def test_a_symbols_cost_does_not_grow_with_what_is_held_back() -> None:
    """The open prefix is long, and breaks again and again."""
    patterns = ["a" * 1000 + "b", *("a" * length + "c" for length in range(1, 100))]
    assert comparisons_per_symbol(patterns, ("a" * 999 + "d") * 5) < 5 * 7


def test_states_are_made_when_they_are_reached() -> None:
    automaton = StopAutomaton([f"{index:064}" for index in range(256)], "")
    assert automaton.root.next == {}
    automaton.step(automaton.root, "x")
    assert automaton.root.next == {"x": automaton.root}
