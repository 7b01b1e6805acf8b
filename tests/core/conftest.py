"""Fixtures of the core's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.core_host import STAGE, Repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    STAGE.clear()
    return Repository(tmp_path)
