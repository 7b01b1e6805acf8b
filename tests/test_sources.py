"""docs/sources.md: each symbol exists, and stands about where the page says."""

from __future__ import annotations

import pytest

from tools.sources import MAX_DRIFT_LINES, PAGE, TERMS, Term, line_of, lines_in, page, without_lines

HOW = "run python -m tools.sources"


@pytest.mark.parametrize("term", [term for terms in TERMS.values() for term in terms], ids=lambda term: term.symbol)
def test_a_symbol_exists(term: Term) -> None:
    assert line_of(term) > 0


def test_a_symbol_that_is_gone_is_named() -> None:
    with pytest.raises(LookupError, match=r"engine/step\.py defines no RowTable\.gone"):
        line_of(Term("gone", "engine/step.py", "RowTable.gone"))


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert without_lines(text) == without_lines(page()), HOW
    drift = [abs(one - other) for one, other in zip(lines_in(text), lines_in(page()), strict=True)]
    assert max(drift) <= MAX_DRIFT_LINES, HOW
