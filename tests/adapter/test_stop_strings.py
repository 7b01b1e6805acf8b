"""Stop strings: the result does not depend on how the text arrives, and no more is held back than must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.adapter.stop_strings import StopStrings


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
