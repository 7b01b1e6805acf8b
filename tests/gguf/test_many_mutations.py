"""The search of test_header.py, for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_header import fuzz

MUTATIONS = 30_000
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_many_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    assert 0 < fuzz(tmp_path, MUTATIONS, seed=4) < MUTATIONS
