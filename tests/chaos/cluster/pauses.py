"""How long streams paused when something was killed.

For: the rounds. Does not know: what was killed. Invariant: of the streams that lived, the one that waited longest
counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .kills import Kill

UNDER_WAY_S = 0.5
"""What was sent before a kill may still come for so long: a pause begins until then."""


@dataclass(frozen=True, order=True)
class Pause:
    """Without a piece, since the kill. pieces: those that the stream had had. kill: for people."""

    seconds: float
    pieces: int
    stream: str
    kill: str = ""

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, behind {self.pieces} pieces of {self.stream}, by {self.kill}"


def longest_pause(kill: Kill, streams: Iterable[tuple[str, Sequence[float]]]) -> Pause | None:
    """The longest that any stream had by this kill; None where none lived. streams: of each a name for people, and the
    ascending monotonic seconds of its begin, pieces and end."""
    found = [pause for name, times_s in streams if (pause := _pause(kill, name, times_s)) is not None]
    return max(found, default=None)


def _pause(kill: Kill, name: str, times_s: Sequence[float]) -> Pause | None:
    """The longest that ends after the kill and begins before it, or not long after."""
    if not times_s[0] < kill.begin_s < times_s[-1]:
        return None
    first = bisect.bisect_right(times_s, kill.begin_s) - 1
    last = min(bisect.bisect_right(times_s, kill.end_s + UNDER_WAY_S), len(times_s) - 1)
    pauses = (
        Pause(times_s[place + 1] - max(times_s[place], kill.begin_s), place, name, f"{kill.kind}: {kill.victim}")
        for place in range(first, last)
    )
    return max(pauses, default=None)
