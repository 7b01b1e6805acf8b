"""One application for the package's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trials.fuzz.app_under_test import AppUnderTest


@pytest.fixture(scope="package")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    running = AppUnderTest(tmp_path_factory.mktemp("repository"))
    yield running
    running.close()
