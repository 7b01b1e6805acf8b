"""Fixtures of the core's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from core_host import STAGE, Repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    STAGE.clear()
    return Repository(tmp_path)
