"""The timer of requests: in order, once, and in proportion to the requests that live."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from llmbackend.adapter.deadlines import Deadlines


@pytest.fixture
def live() -> set[str]:
    return set()


@pytest.fixture
def deadlines(live: set[str]) -> Iterator[Deadlines]:
    deadlines = Deadlines(live.__contains__)
    yield deadlines
    deadlines.close()
    assert "llm-deadlines" not in {thread.name for thread in threading.enumerate()}


def in_ms(count: int) -> int:
    return time.monotonic_ns() + count * 1_000_000


def test_the_earliest_is_called_first_also_when_it_came_last(deadlines: Deadlines) -> None:
    called: queue.Queue[str] = queue.Queue()
    for name, ms in (("c", 60), ("b", 40), ("a", 20)):
        deadlines.add(in_ms(ms), name, called.put)
    assert [called.get(timeout=10) for _ in range(3)] == ["a", "b", "c"]


def test_a_failing_callback_hurts_nobody(deadlines: Deadlines, caplog: pytest.LogCaptureFixture) -> None:
    called: queue.Queue[str] = queue.Queue()

    def fail(name: str) -> None:
        raise ValueError(name)

    deadlines.add(in_ms(1), "bad", fail)
    deadlines.add(in_ms(2), "good", called.put)
    assert called.get(timeout=10) == "good"
    assert "the deadline of request bad" in caplog.text


def test_requests_that_ended_are_forgotten(deadlines: Deadlines, live: set[str]) -> None:
    live.add("0")
    for index in range(10_000):
        deadlines.add(in_ms(3_600_000), str(index), lambda name: None)
    assert len(deadlines._heap) < 2_000
    assert "0" in {entry[2] for entry in deadlines._heap}


def test_nothing_is_called_after_close(live: set[str]) -> None:
    called: list[str] = []
    deadlines = Deadlines(live.__contains__)
    deadlines.add(in_ms(30), "a", called.append)
    deadlines.close()
    deadlines.add(in_ms(0), "b", called.append)
    time.sleep(0.06)
    assert not called
