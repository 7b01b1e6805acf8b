"""What a target has tried and found, and the loop that feeds it.

Used by every target of `make fuzz`. Independent of what an input is. Invariants: the same seed tries the same inputs in
the same order for as long as time permits; a finding includes its smallest input.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Kind = Literal["5xx", "crash", "hang", "violation"]
KINDS: tuple[Kind, ...] = ("5xx", "crash", "hang", "violation")
_BATCH = 250
_MAX_FINDINGS = 5
_SHRINK_S = 15.0
_SHOWN_CHARACTERS = 600
Input = TypeVar("Input")


class Finding(Exception):  # noqa: N818  # what a target raises: hypothesis shrinks its input
    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class _OutOfTimeError(KeyboardInterrupt):
    """What hypothesis lets pass at once, without looking for a smaller input."""


@dataclass
class Tally:
    """One row of the table. `findings`: (kind, what was found, the input)."""

    target: str
    inputs: int = 0
    findings: list[tuple[Kind, str, str]] = field(default_factory=list)

    def add(self, finding: Finding, given_input: object) -> None:
        shown = repr(given_input)
        if len(shown) > _SHOWN_CHARACTERS:
            shown = f"{shown[:_SHOWN_CHARACTERS]}… ({len(shown)} characters)"
        self.findings.append((finding.kind, finding.text[:_SHOWN_CHARACTERS], shown))

    def count(self, kind: Kind) -> int:
        return sum(found == kind for found, _, _ in self.findings)


def drive(
    target: str, inputs: st.SearchStrategy[Input], run: Callable[[Input], None], seconds: float, first_seed: int
) -> Tally:
    """Feeds `run` for `seconds`, or until it has found enough. `run` raises Finding; any other exception is a crash."""
    tally = Tally(target)
    end_s = time.monotonic() + seconds
    for batch_seed in itertools.count(first_seed):
        if time.monotonic() > end_s or len(tally.findings) >= _MAX_FINDINGS:
            return tally
        _batch(tally, inputs, run, batch_seed, end_s)
    raise AssertionError("unreachable")


def _batch(
    tally: Tally, inputs: st.SearchStrategy[Input], run: Callable[[Input], None], batch_seed: int, end_s: float
) -> None:
    failing: tuple[Input, Finding] | None = None

    @seed(batch_seed)
    @settings(
        max_examples=_BATCH,
        database=None,
        derandomize=False,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(inputs)
    def feed(one: Input) -> None:
        nonlocal failing, end_s
        if time.monotonic() > end_s:
            raise _OutOfTimeError
        tally.inputs += 1
        try:
            run(one)
        except Exception as error:
            if failing is None:
                end_s = max(end_s, time.monotonic() + _SHRINK_S)
            finding = error if isinstance(error, Finding) else Finding("crash", f"{type(error).__name__}: {error}")
            failing = (one, finding)  # the last one is the smallest
            raise

    try:
        feed()
    except _OutOfTimeError:
        pass
    except BaseException:
        if failing is None:
            raise
    if failing is not None:
        tally.add(failing[1], failing[0])
