"""Counts that limits are compared with: what is open, by name.

For: whatever counts connections or inferences. Does not know: limits, what names mean. Invariant: a count of
zero takes no memory. The counts of several processes are in `shared_counts.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol


class Counts(Protocol):
    def held(self, name: str) -> int:
        """How many are open."""

    def add(self, name: str, change: int) -> None: ...


class LocalCounts:
    """Of one process. Used on its event loop alone."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    def held(self, name: str) -> int:
        return self._held[name]

    def add(self, name: str, change: int) -> None:
        held = self._held[name] + change
        if held:
            self._held[name] = held
        else:
            del self._held[name]
