"""The Redis store: several servers, one of which ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import redis

from llmbackend.frontends.journals.documents import Append, Capacity, Delete, Put, StoreError
from llmbackend.frontends.journals.redis_storage import RedisStorage, _client
from llmbackend.frontends.journals.response_store import NotStoredError, ResponseStore
from llmbackend.frontends.journals.store_settings import StoreSettings

from .test_response_store import NOW_S, Clock, Collecting, document, events_of, opened

CAPACITY = Capacity(1 << 20, 100)
_ENDED = """
import os, sys
from llmbackend.frontends.journals.documents import Append, Capacity, Document, Put
from llmbackend.frontends.journals.redis_storage import RedisStorage

storage = RedisStorage(sys.argv[1], Capacity(1 << 20, 100))
live = Document("", "response", "a", b"{}", 4e9, 4e9 + 100, is_live=True, continuation=b"how to go on")
storage.commit([Put(live), Append("a", 0, (b"0", b"1"), b"p0"), Append("a", 2, (), b"p1")], 4e9)
os._exit(9)
"""


async def test_one_server_takes_over_what_an_ended_one_has_left(redis_url: str) -> None:
    assert subprocess.run([sys.executable, "-c", _ENDED, redis_url], check=False).returncode == 9
    stores = [ResponseStore(RedisStorage(redis_url, CAPACITY), 100.0, Clock()) for _ in range(2)]
    for store in stores:
        store.producer = Collecting()
        await store.start()
    first, second = (store.producer.found for store in stores)  # type: ignore[union-attr]
    assert [one.continuation for one in first] == [b"how to go on"] and second == []
    log, progress = await stores[0].resume(first[0])
    assert progress == [b"p0", b"p1"] and log.journal.next_number == 2
    log.append([b"2"], b"p2")
    elsewhere = await stores[1].journal(await stores[1].get("", "response", "a"))
    reader = asyncio.create_task(events_of(elsewhere))
    await asyncio.sleep(0)
    await log.finish(replace(first[0], body=b"[]"), [b"3"])
    assert await reader == [(number, b"%d" % number) for number in range(4)]
    for store in stores:
        await store.close()


def test_what_is_held_is_counted(redis_url: str) -> None:
    storage = RedisStorage(redis_url, CAPACITY)
    storage.commit([Put(document("a", is_live=True)), Append("a", 0, (b"x" * 10,), b"y" * 100)], NOW_S)
    storage.commit([Append("gone", 0, (b"x",), b"y")], NOW_S)
    storage.commit([Put(document("a"))], NOW_S)
    assert int(storage._redis.get("llmbackend:responses:bytes")) == document("a").size_bytes + 10
    assert storage.num_events("gone") == 0 and storage.progress("a") == []
    storage.commit([], NOW_S + 1000)
    assert int(storage._redis.get("llmbackend:responses:bytes")) == 0
    storage.close()


def held_bytes(storage: RedisStorage) -> int:
    return int(storage._redis.get("llmbackend:responses:bytes") or 0)


def test_writes_of_one_transaction_are_counted(redis_url: str) -> None:
    storage = RedisStorage(redis_url, CAPACITY)
    live, step = Put(document("a", is_live=True)), Append("a", 0, (b"x" * 10,), b"y" * 100)
    storage.commit([live, step, Append("a", 1, (b"x",), b""), Put(document("a"))], NOW_S)
    assert held_bytes(storage) == document("a").size_bytes + 11
    storage.commit([Append("a", 2, (b"x" * 10,), b""), Delete("a")], NOW_S)
    assert held_bytes(storage) == 0
    storage.commit([live, step, Delete("a")], NOW_S)
    assert held_bytes(storage) == 0
    storage.close()


def test_what_redis_has_removed_is_not_counted(redis_url: str) -> None:
    """No server ran when it expired."""
    storage = RedisStorage(redis_url, CAPACITY)
    storage.commit([Put(document(id)) for id in ("a", "b")], NOW_S)
    storage._redis.delete("llmbackend:responses:doc:a")
    storage.commit([], NOW_S + 3700)
    assert held_bytes(storage) == 0
    storage.commit([Put(document("c"))], NOW_S)
    assert held_bytes(storage) == document("c").size_bytes
    storage.close()


def test_what_another_server_has_removed_is_not_counted_again(redis_url: str) -> None:
    storages = [RedisStorage(redis_url, CAPACITY) for _ in range(2)]
    storages[0].commit([Put(document(id)) for id in ("a", "b")], NOW_S)
    storages[0].commit([Delete("a")], NOW_S)
    storages[1]._remove([b"a"], NOW_S)
    assert held_bytes(storages[1]) == document("b").size_bytes and not storages[1]._is_recount_due
    for storage in storages:
        storage.close()


def test_what_two_servers_remove_at_once_is_subtracted_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storages = [RedisStorage(redis_url, CAPACITY) for _ in range(2)]
    storages[0].commit([Put(document(id)) for id in ("a", "b")], NOW_S)
    both_have_read = threading.Barrier(2)
    for storage in storages:

        def sizes(ids: Collection[str], storage: RedisStorage = storage) -> object:
            found = RedisStorage._sizes(storage, ids)
            monkeypatch.setattr(storage, "_sizes", partial(RedisStorage._sizes, storage))
            both_have_read.wait(20)
            return found

        monkeypatch.setattr(storage, "_sizes", sizes)
    with ThreadPoolExecutor() as pool:
        for removed in [pool.submit(storage._remove, [b"a"], NOW_S) for storage in storages]:
            removed.result()
    assert held_bytes(storages[0]) == document("b").size_bytes
    for storage in storages:
        storage.close()


async def test_a_redis_that_is_away(redis_url: str) -> None:
    with pytest.raises(StoreError, match=r"'127.0.0.1:1/0' failed"):
        StoreSettings(url="redis://user:secret@127.0.0.1:1/0").open()
    storage = RedisStorage(redis_url, CAPACITY)
    async with opened(storage) as store:
        await store.put(document("a"))
        storage._redis.connection_pool.disconnect()
        storage._redis = _client("redis://127.0.0.1:1/0")
        with pytest.raises(StoreError):
            await store.put(document("b"))


def test_a_claim_is_not_lost_if_redis_fails_after_it(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert subprocess.run([sys.executable, "-c", _ENDED, redis_url], check=False).returncode == 9
    storage = RedisStorage(redis_url, CAPACITY)
    with monkeypatch.context() as away:
        away.setattr(storage, "_document", Mock(side_effect=redis.ConnectionError))
        with pytest.raises(StoreError):
            storage.live()
    assert [one.id for one in storage.live()] == ["a"] and storage.live() == []
    storage.close()


async def test_a_response_that_another_server_has_deleted_stays_deleted(redis_url: str) -> None:
    first, second = (ResponseStore(RedisStorage(redis_url, CAPACITY), 100.0, Clock()) for _ in range(2))
    log = first.begin(document("a", is_live=True))
    log.append([b"0"], b"p0")
    await log.committed()
    await second.delete("", "response", "a")
    log.append([b"1"], b"p1")
    await log.finish(document("a", body=b"[]"), [b"2"])
    for store in (first, second):
        with pytest.raises(NotStoredError):
            await store.get("", "response", "a")
        await store.close()


def test_an_end_does_not_replace_that_of_another_server(redis_url: str) -> None:
    storages = [RedisStorage(redis_url, CAPACITY) for _ in range(2)]
    first, second = storages
    first.commit([Put(document("a", is_live=True)), Append("a", 0, (b"0",), b"")], NOW_S)
    first._redis.hset("llmbackend:responses:live", "a", second._instance)  # it has taken the document over
    second.commit([Append("a", 1, (b"1",), b""), Put(document("a", body=b'"whole"'), is_end=True)], NOW_S)
    first.commit([Append("a", 1, (b"late",), b""), Put(document("a", body=b'"failed"'), is_end=True)], NOW_S)
    found = first.get("a", NOW_S)
    assert found is not None and found.body == b'"whole"' and first.events("a", 0, 100) == [b"0", b"1"]
    for storage in storages:
        storage.close()


async def test_a_server_that_was_taken_for_ended_is_refused(redis_url: str) -> None:
    """It lost its lease while it stood still: what it writes afterwards does not count, and its readers go on with what
    the other server writes."""
    stores = [ResponseStore(RedisStorage(redis_url, CAPACITY), 100.0, Clock()) for _ in range(2)]
    for store in stores:
        store.producer = Collecting()
    first, second = stores
    await first.start()
    log = first.begin(document("a", is_live=True))
    failures: list[Exception] = []
    log.on_failure = failures.append
    log.append([b"0"], b"p0")
    await log.committed()
    reader = asyncio.create_task(events_of(log.journal))
    storage = first._commits._storage
    assert isinstance(storage, RedisStorage)
    storage._closing.set()  # it stands still
    storage._redis.delete(f"llmbackend:responses:instance:{storage._instance}")
    await second.start()
    (taken,) = second.producer.found  # type: ignore[union-attr]
    going_on, progress = await second.resume(taken)
    assert progress == [b"p0"]
    going_on.append([b"1"], b"p1")
    await going_on.committed()
    log.append([b"never"], b"never")
    await log.committed()
    await log.finish(replace(log.document, body=b'"never"'), [b"never"])
    assert len(failures) == 1 and "another server continues 'a'" in str(failures[0])
    await going_on.finish(replace(taken, body=b"[]"), [b"2"])
    assert await reader == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert (await first.get("", "response", "a")).body == b"[]"
    for store in stores:
        await store.close()


def test_requests_do_not_wait_long_for_a_server_that_hangs(redis_url: str) -> None:
    client = _client(redis_url)
    pid = client.info("server")["process_id"]

    async def run() -> None:
        async with opened(RedisStorage(redis_url, CAPACITY)) as store:
            await store.put(document("a"))
            os.kill(pid, signal.SIGSTOP)
            try:
                log = store.begin(document("live", is_live=True))
                for work in (
                    store.get("", "response", "a"),
                    store.put(document("b")),
                    store.delete("", "response", "a"),
                    log.committed(),
                ):
                    with pytest.raises(StoreError, match="did not answer within 1 s"):
                        await work
            finally:
                os.kill(pid, signal.SIGCONT)
            await log.wait_for_capacity()
            assert (await store.get("", "response", "a")).id == "a"

    asyncio.run(run())
    client.close()
