"""The structure of the package: no import circles, no overlong files, each module says what it is for."""

from __future__ import annotations

import pytest

from tools.structure import PAGE, Module, import_circles, page, read_modules

MAX_LINES = 500


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules()


def test_modules_do_not_import_each_other_in_circles(modules: dict[str, Module]) -> None:
    assert import_circles(modules) == []


def test_no_file_is_overlong(modules: dict[str, Module]) -> None:
    assert {one.name: one.num_lines for one in modules.values() if one.num_lines > MAX_LINES} == {}


def test_each_module_says_what_it_is_for(modules: dict[str, Module]) -> None:
    assert [one.name for one in modules.values() if not one.head] == []


def test_the_list_of_modules_is_up_to_date(modules: dict[str, Module]) -> None:
    assert page(modules) == PAGE.read_text(), "python -m tools.structure --write"
