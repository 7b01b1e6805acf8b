"""How many sequences a state machine tries, and of which length; how many random texts the tests of parsers try.

Used by the stateful tests of tests/properties, and by tests with random texts or cuts. The suite tries the same few
every time (profile `suite` of tests/conftest.py, derandomised), `make test-all` four times as many (`nightly`; `shrink`
makes a failing sequence short). To search, 200 times as many and new sequences each time:

    python -m pytest tests/properties --hypothesis-profile=search --timeout=0

A sequence that fails is shrunk, printed as a program, and kept in `.hypothesis/` for the next run.
`--hypothesis-seed=N` repeats a search.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def machine_settings(examples: int, steps: int) -> settings:
    """`examples` sequences of at most `steps` rules each night; a profile's max_examples is a share of it, in %."""
    return settings(
        max_examples=tries(examples),
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )


def tries(each_night: int) -> int:
    """So many that the same profiles try."""
    profile = settings.default
    assert profile is not None
    return max(each_night * profile.max_examples // 100, 1)
