"""`make schemas` in small: a few schemas of each family, and of each public suite that is installed."""

from __future__ import annotations

import random

import pytest

from tests.helpers.byte_grammars import compiler
from trials.schemas.families import FAMILIES
from trials.schemas.verdict import Tally, judge

COMPILER = compiler()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str) -> None:
    rng, tally = random.Random(f"{family} quick"), Tally()
    for _ in range(6):
        judge(COMPILER, FAMILIES[family](rng), rng, tally, walks=2)
    assert tally.wrong_verdicts == []
    if family == "refused":
        assert tally.refused == tally.schemas
    else:
        assert tally.refused <= tally.schemas // 2
        assert tally.wrong_texts


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_family_that_is_not_named_as_left_out(family: str) -> None:
    rng, tally = random.Random(f"{family} not strict"), Tally()
    for _ in range(6):
        judge(COMPILER, FAMILIES[family](rng), rng, tally, walks=2, is_strict=False)
    assert tally.wrong_verdicts == []
    if family == "refused":
        assert tally.reduced > tally.refused
