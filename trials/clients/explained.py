"""Client tests that fail for reasons of their own, with those reasons: explained.toml.

Used by the command. Independent of how suites run. Invariant: an explanation that is no longer needed is reported, so
that the file stays accurate.
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
