"""What a start does, and how long each part of it takes: from deep in the loader to the log of the host.

For: whatever takes time in a start, which names it; the engine's process, which collects and sends it. Does not know:
processes, logs. Invariant: naming a part without a collector costs nothing, and no part of a start depends on one.
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


class _Collector:
    def __init__(self) -> None:
        self.parts: list[StartPart] = []
        self.inner_s = 0.0
        """Of the parts within the one that is being measured."""


_collector: ContextVar[_Collector | None] = ContextVar("start_parts", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[StartPart]]:
    """The parts that this thread ends meanwhile, in the order of their ends."""
    collector = _Collector()
    token = _collector.set(collector)
    try:
        yield collector.parts
    finally:
        _collector.reset(token)


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """What is done inside is a part of the start."""
    collector = _collector.get()
    if collector is None:
        yield
        return
    outer_s, collector.inner_s = collector.inner_s, 0.0
    start_s = time.perf_counter()
    try:
        yield
    finally:
        took_s = time.perf_counter() - start_s
        collector.parts.append(StartPart(name, took_s - collector.inner_s))
        collector.inner_s = outer_s + took_s


def text_of(parts: Sequence[StartPart]) -> str:
    """For the log: "read image 0.31 s, program 0.04 s"."""
    return ", ".join(f"{each.name} {each.seconds:.2f} s" for each in parts)
