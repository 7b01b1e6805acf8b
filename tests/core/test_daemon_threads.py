"""DaemonThreadPool: questions reuse a thread, do not delay one another, and go on where no thread can be started."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from llmbackend.core.daemon_threads import DaemonThreadPool
from tests.helpers.waiting import eventually

NAME = "test-kept-threads"


@pytest.fixture
def threads() -> Iterator[DaemonThreadPool]:
    threads = DaemonThreadPool(NAME)
    yield threads
    threads.close()
    eventually(lambda: not running(), 10)


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def asked(threads: DaemonThreadPool, waits_for: threading.Event | None = None) -> Future[int | None]:
    """The number of the thread that answers."""
    answer: Future[int | None] = Future()

    def job() -> None:
        if waits_for is not None:
            waits_for.wait(20)
        answer.set_result(threading.get_ident())

    threads.run(job)
    return answer


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_one_thread_answers_question_after_question(threads: DaemonThreadPool) -> None:
    idents = set()
    for _ in range(5):
        idents.add(asked(threads).result(10))
        eventually(lambda: threads._num_free == 1, 10)
    assert len(idents) == 1 and len(running()) == 1


def test_one_that_hangs_delays_no_other_and_one_thread_is_kept(threads: DaemonThreadPool) -> None:
    goes_on = threading.Event()
    slow = [asked(threads, goes_on) for _ in range(3)]
    assert asked(threads).result(10) not in (None, 0)
    goes_on.set()
    assert len({answer.result(10) for answer in slow}) == 3
    eventually(lambda: len(running()) == 1, 10)


def test_where_no_thread_can_be_started_questions_wait_for_those_that_exist(
    threads: DaemonThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    slow = asked(threads, goes_on)
    with monkeypatch.context() as patched:
        refuse(patched)
        waiting = [asked(threads) for _ in range(3)]
        assert not any(answer.done() for answer in waiting)
        goes_on.set()
        assert {answer.result(10) for answer in waiting} == {slow.result(10)}
        assert asked(threads).result(10) == slow.result(10)


def test_a_question_after_close_is_answered_or_refused(
    threads: DaemonThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(threads).result(10)
    eventually(lambda: threads._num_free == 1, 10)
    threads.close()
    with monkeypatch.context() as patched:
        refuse(patched)
        with pytest.raises(RuntimeError):
            asked(threads)
    assert asked(threads).result(10)


def test_a_question_that_waits_for_a_thread_is_answered_after_close(
    threads: DaemonThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    asked(threads, goes_on)
    with monkeypatch.context() as patched:
        refuse(patched)
        waiting = [asked(threads) for _ in range(2)]
        threads.close()
    goes_on.set()
    for answer in waiting:
        assert answer.result(10)


def test_without_any_thread_the_question_is_refused(threads: DaemonThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        refuse(patched)
        with pytest.raises(RuntimeError, match="can't start"):
            asked(threads)
    assert asked(threads).result(10)
