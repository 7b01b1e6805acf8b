"""How long streams paused after a kill.

Used by the rounds. Independent of what was killed. Invariant: the longest wait among the live streams counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from .kills import Kill

NO_LOSSES: Final[Mapping[str, Sequence[float]]] = MappingProxyType({})
UNDER_WAY_S = 0.5
"""What was sent before a kill may still come for so long: a pause begins until then."""


@dataclass(frozen=True, order=True)
class Pause:
    """Without a piece, since the kill. pieces: those that the stream had had. kill: for people. lost_s: since the kill,
    when its client noticed that a connection was lost, or could not be had; it came back at once each time."""

    seconds: float
    pieces: int
    stream: str
    kill: str = ""
    lost_s: tuple[float, ...] = ()

    def __str__(self) -> str:
        shown = f"{self.seconds:.2f} s, behind {self.pieces} pieces of {self.stream}, by {self.kill}"
        if not self.lost_s:
            return shown
        lost = ", ".join(f"{seconds:.2f}" for seconds in self.lost_s)
        return f"{shown}: no connection at {lost} s, and {self.seconds - self.lost_s[-1]:.2f} s to the next piece"


def longest_pause(
    kill: Kill, streams: Iterable[tuple[str, Sequence[float]]], lost: Mapping[str, Sequence[float]] = NO_LOSSES
) -> Pause | None:
    """The longest that any stream had by this kill; None where none lived. streams: of each a name for people, and the
    ascending monotonic seconds of its begin, pieces and end. lost: by name, when connections of streams were lost."""
    found = [pause for name, times_s in streams if (pause := _pause(kill, name, times_s)) is not None]
    longest = max(found, default=None)
    if longest is None:
        return None
    since_s = sorted(when_s - kill.begin_s for when_s in lost.get(longest.stream, ()))
    return replace(longest, lost_s=tuple(when_s for when_s in since_s if 0 <= when_s <= longest.seconds))


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
