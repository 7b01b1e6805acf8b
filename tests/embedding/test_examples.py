"""The examples of docs/embedding.md run as they stand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.examples import EXAMPLES

pytestmark = pytest.mark.slow

PRINTED = (
    ("inference server", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ("Jupiter",),
    ("demo model", "http://127.0.0.1:"),
)
"""What the examples print, among others: answers, not noise."""


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES[number]], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    assert all(text in done.stdout for text in PRINTED[number]), done.stdout
