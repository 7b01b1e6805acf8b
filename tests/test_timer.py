"""Timer: alarms run also if its thread could not be started at first."""

from __future__ import annotations

import threading
import time

import pytest

from llmbackend.waiting.timer import Timer
from tests.helpers.thread_shortage import no_new_threads


def test_a_timer_whose_thread_could_not_be_started_can_be_started_later() -> None:
    timer = Timer()
    with no_new_threads("timer"), pytest.raises(RuntimeError, match="can't start new thread"):
        timer.start()
    timer.stop()
    timer.start()
    has_run = threading.Event()
    timer.set(has_run.set, time.monotonic_ns())
    assert has_run.wait(20)
    timer.stop()
