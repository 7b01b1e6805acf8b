"""Tests of the clients that fail for a reason of their own, each with that reason: explained.toml.

For: the command. Does not know: how suites run. Invariant: an explanation that nothing needs any more is reported, so
that the file says what is so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from .suites import Result

FILE = Path(__file__).parent / "explained.toml"


def explanations() -> dict[str, dict[str, str]]:
    """By suite, then by test: why it fails."""
    document = tomllib.loads(FILE.read_text())
    return {suite: dict(tests) for suite, tests in document.items()}


def problems(results: Sequence[Result]) -> list[str]:
    """Failures without an explanation, and explanations without a failure."""
    found = []
    known = explanations()
    for result in results:
        expected = known.get(result.suite.name, {})
        found += [
            f"{result.suite.name}: {test}: {message[:300]}"
            for test, message in result.failures.items()
            if test not in expected
        ]
        found += [
            f"{result.suite.name}: {test} passes, but explained.toml says why it fails"
            for test in expected
            if test not in result.failures
        ]
    return found
