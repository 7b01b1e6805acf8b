"""How many sequences a state machine tries, and of which length.

Used by the stateful tests of this directory. The suite runs the same few sequences every time (profile `suite` of
tests/conftest.py, derandomised), `make test-all` four times as many (`nightly`; `shrink` makes a failure of those
short). To search, 200 times as many and new ones each time:

    python -m pytest tests/properties --hypothesis-profile=search --timeout=0

A sequence that fails is shrunk, printed as a program, and kept in `.hypothesis/` for the next run.
`--hypothesis-seed=N` repeats a search.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def machine_settings(examples: int, steps: int) -> settings:
    """`examples` sequences of at most `steps` rules each night; a profile's max_examples is a share of it, in %."""
    profile = settings.default
    assert profile is not None
    return settings(
        max_examples=max(examples * profile.max_examples // 100, 1),
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )
