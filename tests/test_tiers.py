"""Which tests are nightly: names are those of tests, and of a product of parameters every fifth is daily."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.tiers import NIGHTLY_TESTS, ONE_OF_FIVE, TESTS, nightly


def item(test: str) -> Any:
    """What `nightly` reads of a pytest.Item without parameters that it knows."""
    file, _, name = test.partition("::")
    return SimpleNamespace(path=TESTS / file, name=name)


@pytest.mark.parametrize("test", [*NIGHTLY_TESTS, *ONE_OF_FIVE])
def test_a_name_is_that_of_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    function = name.partition("[")[0]
    assert re.search(rf"^def {function}\(", (TESTS / file).read_text(), re.MULTILINE)


def test_every_fifth_is_daily() -> None:
    items = [item(f"{ONE_OF_FIVE[0]}[{i}]") for i in range(12)]
    assert [i for i, each in enumerate(items) if each not in list(nightly(items))] == [0, 5, 10]


def test_a_name_or_the_beginning_of_its_parameters() -> None:
    whole = next(test for test in NIGHTLY_TESTS if "[" not in test)
    part = next(test for test in NIGHTLY_TESTS if "[" in test)
    found = [item(name) for name in (whole, f"{whole}[a]", f"{whole}_b", f"{part}x", part.partition("[")[0])]
    assert list(nightly(found)) == [found[0], found[1], found[3]]
