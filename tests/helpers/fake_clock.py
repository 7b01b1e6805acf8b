"""A clock that advances only when told to."""

from __future__ import annotations


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
