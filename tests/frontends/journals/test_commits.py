"""Writes to a store that fails in ways that it does not foresee."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from llmbackend.frontends.journals import response_store
from llmbackend.frontends.journals.documents import Capacity, Commits, Document, Put, Storage, StoreError, Write
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.sqlite_storage import SqliteStorage
from tests.helpers.waiting import eventually_async

from .test_response_store import NOW_S, TTL_S, Clock, Collecting, document

CAPACITY = Capacity(1 << 20, 100)


class Failing(SqliteStorage):
    """`errors` are raised by the next commits."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(None, CAPACITY)
        self.errors = list(errors)

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        if self.errors:
            raise self.errors.pop(0)
        return super().commit(writes, now_s)


@pytest.mark.parametrize("error", [StoreError("no room"), ValueError("a bug")])
async def test_an_error_of_any_kind_reaches_those_who_wait_and_nobody_else(error: Exception) -> None:
    commits = Commits(Failing(error), Clock())
    both = [commits.add([Put(document(id))]) for id in ("a", "b")]
    for done in both:
        with pytest.raises(StoreError, match=str(error)):
            await commits.settled(done)
    await commits.settled(commits.add([Put(document("c"))]))
    assert await commits.read(lambda storage, now_s: storage.get("c", now_s)) is not None
    await commits.close()


async def test_a_read_waits_only_for_the_writes_before_it(tmp_path: Path) -> None:
    loop, is_read = asyncio.get_running_loop(), threading.Event()

    class Busy(SqliteStorage):
        """During each commit, the next write arrives."""

        def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
            if not is_read.is_set():
                asyncio.run_coroutine_threadsafe(one_more(), loop).result(60)
            return super().commit(writes, now_s)

    async def one_more() -> None:
        commits.add([Put(document("later"))])

    commits = Commits(Busy(tmp_path / "store", CAPACITY), Clock())
    commits.add([Put(document("a"))])
    async with asyncio.timeout(60):
        assert await commits.read(lambda storage, now_s: storage.get("a", now_s)) is not None
    is_read.set()
    await commits.close()


async def test_a_shared_store_that_fails_at_the_start_is_tried_again() -> None:
    class Away(Failing):
        takeover_interval_s: float | None = 0.01

        def live(self) -> list[Document]:
            if self.errors:
                raise self.errors.pop(0)
            return [] if claimed.is_set() else super().live()

    class Interrupted(Collecting):
        """The store fails once more, when the document has been claimed."""

        is_interrupted = False

        async def take_over(self, document: Document) -> None:
            if not self.is_interrupted:
                self.is_interrupted = True
                claimed.set()
                raise StoreError("away")
            await super().take_over(document)

    claimed = asyncio.Event()
    storage = Away()
    storage.commit([Put(document("a", is_live=True))], NOW_S)
    storage.errors = [StoreError("away"), StoreError("away")]
    store = ResponseStore(storage, TTL_S, Clock())
    store.producer = producer = Interrupted()
    await store.start()
    await eventually_async(lambda: bool(producer.found), 10)
    await store.close()


def test_what_can_not_be_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(storage: Storage, now_s: float) -> None:
        raise StoreError("no disk")

    async def run() -> None:
        commits = Commits(Failing(), Clock())
        for read in (commits.read, commits.read_in_time):
            with pytest.raises(StoreError, match="no disk"):
                await read(fail)
        await commits.close()

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == ["no disk"] * 2


async def test_expiry_is_tried_again_behind_a_store_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "_EXPIRY_RETRY_S", 0.0)
    storage, clock = Failing(), Clock()
    store = ResponseStore(storage, TTL_S, clock)
    await store.start()
    await store.put(document("a"))
    clock.now_s = NOW_S + TTL_S + 1
    storage.errors = [StoreError("away")]
    store._begin_expiry()
    await eventually_async(lambda: not storage.errors, 10)
    await eventually_async(lambda: not storage.held_bytes, 10)
    await store.close()
