"""What a start does, how long each part of it takes, which ways it chose: from deep in the loader to the log.

For: what takes time in a start, or chooses a way, and names it; the engine's process, which collects and sends it. Does
not know: processes, logs. Invariant: naming a part without a collector costs nothing, and no part of a start depends on
one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import msgspec


class StartPart(msgspec.Struct, frozen=True, array_like=True):
    """One thing that was done, and its duration without the parts within it."""

    name: str
    seconds: float


class Start:
    """A start so far. One thread writes to it."""

    def __init__(self, parts: tuple[StartPart, ...] = ()) -> None:
        self.parts = parts
        """In the order of their ends."""
        self.notes: tuple[str, ...] = ()
        self._inner_s = 0.0
        """Of the parts within the one that is being measured."""

    def begin(self, earlier: Start) -> None:
        """What was done for it before."""
        self.parts, self.notes = earlier.parts + self.parts, earlier.notes + self.notes

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        outer_s, self._inner_s = self._inner_s, 0.0
        start_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - start_s
            self.parts += (StartPart(name, took_s - self._inner_s),)
            self._inner_s = outer_s + took_s


_start: ContextVar[Start | None] = ContextVar("start", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[Start]:
    """What this thread does meanwhile."""
    start = Start()
    token = _start.set(start)
    try:
        yield start
    finally:
        _start.reset(token)


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """What is done inside is a part of the start."""
    start = _start.get()
    if start is None:
        yield
        return
    with start.measure(name):
        yield


def note(text: str) -> None:
    """Which way was chosen, and why; for the log."""
    start = _start.get()
    if start is not None:
        start.notes += (text,)


def text_of(parts: Sequence[StartPart]) -> str:
    """For the log: "read image 0.31 s, program 0.04 s". What took no time is left out."""
    seconds: dict[str, float] = {}
    for each in parts:
        seconds[each.name] = seconds.get(each.name, 0.0) + each.seconds
    return ", ".join(f"{name} {took_s:.2f} s" for name, took_s in seconds.items() if took_s >= 0.005)
