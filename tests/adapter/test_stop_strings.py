"""Stop strings and stop sequences: the result does not depend on how output is cut into pieces; costs are bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.adapter.text.output_assembler import OutputAssembler, State, StopAutomaton, StopSequences, StopStrings
from llmbackend.adapter.text.tokenizer import ByteTokenizer
from llmbackend.engine.messages import StepOutput

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


# --- stop strings -----------------------------------------------------------------------------------------------------


def run(pieces: list[str], stop: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """(texts let through, the stop string that matched)."""
    search = StopStrings(stop, include)
    shown: list[str] = []
    for piece in pieces:
        shown.append(search.push(piece))
        if search.matched is not None:
            return shown, search.matched
    shown.append(search.flush())
    return shown, None


def reference(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [one for one in stop if text[:end].endswith(one)]
        if complete:
            found = max(complete, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="ab<>", max_size=4), max_size=12),
    stop=st.lists(st.text(alphabet="ab<>", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_any_split_gives_the_same_text_and_match(pieces: list[str], stop: list[str], include: bool) -> None:
    shown, matched = run(pieces, stop, include)
    assert ("".join(shown), matched) == reference("".join(pieces), stop, include)


@given(
    pieces=st.lists(st.text(alphabet="ab", min_size=1, max_size=2), max_size=10),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    search = StopStrings(stop)
    total = shown = ""
    for piece in pieces:
        total += piece
        shown += search.push(piece)
        if search.matched is not None:
            return
        held = total[len(shown) :]
        possible = [total[start:] for start in range(len(total)) if any(s.startswith(total[start:]) for s in stop)]
        assert held == max(possible, key=len, default="")


def test_only_a_true_partial_match_waits() -> None:
    assert run(["Hello", " <", "b>"], ["<end>"])[0] == ["Hello", " ", "<b>", ""]


@pytest.mark.parametrize(("include", "expected"), [(False, "yes "), (True, "yes <end>")])
def test_the_text_is_cut_at_the_stop_string(include: bool, expected: str) -> None:
    shown, matched = run(["yes <e", "nd> no"], ["<end>"], include)
    assert "".join(shown) == expected
    assert matched == "<end>"


def test_without_stop_strings_all_text_passes_at_once() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


# --- stop sequences of token ids --------------------------------------------------------------------------------------


def first_end(sequences: tuple[tuple[int, ...], ...], tokens: list[int]) -> int | None:
    """By looking at every beginning of the tokens: the length of the first one that ends with a sequence."""
    for length in range(1, len(tokens) + 1):
        if any(tuple(tokens[:length][-len(one) :]) == one for one in sequences):
            return length
    return None


def test_the_first_sequence_that_is_complete_ends_it() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sequences = tuple(tuple(draw.choices(range(3), k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3)))
        tokens = draw.choices(range(3), k=draw.randint(0, 20))
        search = StopSequences(sequences)
        found = next((index + 1 for index, token in enumerate(tokens) if search.push(token)), None)
        assert found == first_end(sequences, tokens)


def test_a_sequence_ends_a_generation_and_its_tokens_stay_however_the_steps_are_cut() -> None:
    for step_size in (1, 2, 5, 20):
        one = OutputAssembler(
            ByteTokenizer().detokenizer([], skip_special_tokens=True), stop_sequences=(tuple(b"END"),)
        )
        tokens = list(b"ab END cd")
        for start in range(0, len(tokens), step_size):
            one.push(StepOutput("r", tuple(tokens[start : start + step_size])))
            if one.finish_reason is not None:
                break
        chunk = one.take()
        assert (chunk.token_ids, "".join(chunk.text), chunk.finish_reason) == (list(b"ab END"), "ab END", "stop")
        assert not chunk.ends_with_stop_token
