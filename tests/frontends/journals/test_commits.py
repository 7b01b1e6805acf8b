"""Writes to a store that fails in ways that it does not foresee."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import pytest

from llmbackend.frontends.journals import response_store
from llmbackend.frontends.journals.documents import Capacity, Commits, Put, Storage, StoreError, Write
from llmbackend.frontends.journals.response_store import ResponseStore, StoreOptions
from llmbackend.frontends.journals.sqlite_storage import SqliteStorage
from tests.helpers.waiting import eventually_async

from .test_response_store import NOW_S, TTL_S, Clock, document

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
    store = ResponseStore(storage, StoreOptions(ttl_s=TTL_S), clock)
    await store.start()
    await store.put(document("a"))
    clock.now_s = NOW_S + TTL_S + 1
    storage.errors = [StoreError("away")]
    store._begin_expiry()
    await eventually_async(lambda: not storage.errors, 10)
    await eventually_async(lambda: not storage.held_bytes, 10)
    await store.close()
