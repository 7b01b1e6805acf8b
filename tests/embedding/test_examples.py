"""The examples of docs/embedding.md run as they stand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.examples import EXAMPLES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES[number]], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and not done.stderr, done.stderr
