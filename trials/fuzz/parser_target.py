"""Texts in every tool-call and reasoning format, correct and incorrect, split at random: the parsers' invariants must
hold.

Part of `make fuzz`. Independent of servers. Invariant: each format gets at least NUM_CUTS, however short the time.
"""

from __future__ import annotations

import itertools
import time

from tests.frontends.parsers.laws import Cuts, distinct_formats

from .tally import Finding, Tally

NUM_CUTS = 10_000
"""For each format."""
_BATCH = 100
_MAX_FINDINGS = 5


def run_parsers(seconds: float, seed: int) -> Tally:
    tally = Tally("parsers")
    end_s = time.monotonic() + seconds
    cuts = {name: Cuts(name, seed) for name in distinct_formats()}
    for batch in itertools.count():
        if batch * _BATCH >= NUM_CUTS and time.monotonic() > end_s:
            return tally
        for of_format in cuts.values():
            _try(of_format, tally)
            if len(tally.findings) >= _MAX_FINDINGS:
                return tally
    raise AssertionError("unreachable")


def _try(cuts: Cuts, tally: Tally) -> None:
    for _ in range(_BATCH):
        tally.inputs += 1
        try:
            cuts.check_next()
        except AssertionError as error:
            tally.add(Finding("violation", str(error)), cuts.format_name)
            return
        except Exception as error:
            tally.add(Finding("crash", repr(error)), cuts.format_name)
            return
