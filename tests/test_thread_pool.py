"""ThreadPool: what no thread could be started for never runs."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future

import pytest

from llmbackend.waiting.thread_pool import ThreadPool
from tests.helpers.thread_shortage import no_new_threads


def test_work_that_was_refused_never_runs() -> None:
    ran: list[str] = []
    with ThreadPool(2) as pool:
        with no_new_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
            pool.submit(ran.append, "refused")
        pool.submit(ran.append, "accepted").result(10)
    assert ran == ["accepted"]


def test_work_of_a_busy_pool_is_refused_too() -> None:
    may_end, ran = threading.Event(), list[str]()
    with ThreadPool(2) as pool:
        busy: Future[bool] = pool.submit(may_end.wait, 10)
        with no_new_threads(), pytest.raises(RuntimeError):
            pool.submit(ran.append, "refused")
        may_end.set()
        assert busy.result(10)
    assert not ran


def test_an_error_is_the_futures_and_keeps_nothing_alive(no_garbage_collector: None) -> None:
    class Model:
        def load(self) -> None:
            raise ValueError("wrong")

    model = Model()
    kept = weakref.ref(model)
    with ThreadPool(1) as pool:
        future = pool.submit(model.load)
        assert isinstance(future.exception(10), ValueError)
    del model, future
    assert kept() is None
