"""docs/features.md: each row's tests exist, and the page is what the table says."""

from __future__ import annotations

from tools.features import PAGE, missing_tests, page, read_features


def test_every_feature_names_tests_that_exist() -> None:
    assert list(missing_tests(read_features())) == []


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(read_features()), "run python tools/features.py"
