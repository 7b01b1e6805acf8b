"""ResponseStore: what is kept, for whom and how long, and journals of what is being written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from llmbackend.frontends.journals.documents import (
    Capacity,
    Delete,
    Document,
    Entry,
    Put,
    Storage,
    StoreError,
    Write,
)
from llmbackend.frontends.journals.journal import EventsGoneError, Journal
from llmbackend.frontends.journals.redis_storage import RedisStorage
from llmbackend.frontends.journals.response_store import (
    LineageTooLongError,
    NotStoredError,
    ResponseStore,
)
from llmbackend.frontends.journals.sqlite_storage import SqliteStorage

TTL_S = 100.0
NOW_S = 4e9
"""Later than Redis' own clock says."""
Run = Callable[[Coroutine[Any, Any, None]], None]


class Collecting:
    """A Producer."""

    def __init__(self) -> None:
        self.found: list[Document] = []

    async def take_over(self, document: Document) -> None:
        self.found.append(document)

    async def suspend(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def document(id: str, owner: str = "", body: bytes = b"{}", parent: str = "", is_live: bool = False) -> Document:
    return Document(owner, "response", id, body, NOW_S, NOW_S + TTL_S, parent=parent, is_live=is_live)


@asynccontextmanager
async def opened(
    storage: Storage, clock: Clock | None = None, max_log_bytes: int = 1 << 20
) -> AsyncIterator[ResponseStore]:
    store = ResponseStore(storage, TTL_S, clock or Clock(), max_log_bytes=max_log_bytes)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


class MakeStorage(Protocol):
    def __call__(self, max_bytes: int = 1 << 20, max_documents: int = 100) -> Storage: ...


@pytest.fixture(params=["memory", "sqlite", "redis"])
def make_storage(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStorage:
    """Opens the same store each time, if it is one that stays."""

    def make(max_bytes: int = 1 << 20, max_documents: int = 100) -> Storage:
        capacity = Capacity(max_bytes, max_documents)
        if request.param == "redis":
            return RedisStorage(request.getfixturevalue("redis_url"), capacity)
        return (
            SqliteStorage(None, capacity) if request.param == "memory" else SqliteStorage(tmp_path / "store", capacity)
        )

    return make


async def events_of(journal: Journal, after: int = -1) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    async for events in journal.follow(after):
        found += enumerate(events.parts, events.first)
    return found


async def is_stored(store: ResponseStore, id: str, owner: str = "") -> bool:
    try:
        await store.get(owner, "response", id)
    except NotStoredError:
        return False
    return True


async def test_documents_are_for_their_owner_alone(make_storage: MakeStorage) -> None:
    async with opened(make_storage()) as store:
        await store.put(document("a", owner="one"))
        assert (await store.get("one", "response", "a")).body == b"{}"
        for owner, kind in (("two", "response"), ("", "response"), ("one", "conversation")):
            with pytest.raises(NotStoredError):
                await store.get(owner, kind, "a")  # type: ignore[arg-type]
            with pytest.raises(NotStoredError):
                await store.delete(owner, kind, "a")  # type: ignore[arg-type]
        await store.delete("one", "response", "a")
        assert not await is_stored(store, "a", "one")


async def test_expiry_is_seen_at_once_and_frees_what_was_held() -> None:
    clock, storage = Clock(), SqliteStorage(None, Capacity(1 << 20, 100))
    async with opened(storage, clock) as store:
        await store.put(document("a"))
        clock.now_s += TTL_S
        assert not await is_stored(store, "a")
        await store.put(replace(document("b"), expires_s=clock.now_s + 1))
        assert storage.held_bytes == document("b").size_bytes


async def test_the_oldest_go_first_and_live_ones_stay(make_storage: MakeStorage) -> None:
    async with opened(make_storage(max_documents=2)) as store:
        log = store.begin(document("live", is_live=True))
        for name in "abc":
            await store.put(document(name))
        await store.put(document("x", owner="other"))
        assert [await is_stored(store, id) for id in ("live", "a", "b", "c")] == [True, False, False, True]
        assert await is_stored(store, "x", "other")
        await log.finish(document("live"))


async def test_the_store_holds_no_more_than_its_bytes(make_storage: MakeStorage) -> None:
    async with opened(make_storage(max_bytes=1000)) as store:
        for name in "abcd":
            await store.put(document(name, body=b"x" * 300))
        assert [await is_stored(store, id) for id in "abcd"] == [False, True, True, True]


async def test_lineage(make_storage: MakeStorage) -> None:
    async with opened(make_storage()) as store:
        await store.put(document("a"))
        await store.put(document("b", parent="a"))
        await store.put(document("c", parent="b"))
        found = await store.lineage("", "response", "c", 1 << 20)
        assert [one.id for one in found] == ["a", "b", "c"]
        with pytest.raises(LineageTooLongError, match="at most 8 bytes"):
            await store.lineage("", "response", "c", 8)
        await store.delete("", "response", "a")
        with pytest.raises(NotStoredError, match="a"):
            await store.lineage("", "response", "c", 1 << 20)


def at(clock: Clock, id: str, parent: str = "") -> Document:
    made = document(id, body=b"x" * 300, parent=parent)
    return replace(made, created_s=clock.now_s, expires_s=clock.now_s + TTL_S)


async def test_a_document_is_kept_as_long_as_one_that_continues_it(make_storage: MakeStorage) -> None:
    clock = Clock()
    async with opened(make_storage(), clock) as store:
        chain: list[tuple[str, tuple[str, ...]]] = [("a", ()), ("b", ("a",)), ("c", ("a", "b"))]
        for id, ancestors in chain:
            await store.put(at(clock, id, "".join(ancestors[-1:])), ancestors)
            clock.now_s += TTL_S - 1
        assert [one.id for one in await store.lineage("", "response", "c", 1 << 20)] == ["a", "b", "c"]
        log = store.begin(replace(at(clock, "live"), is_live=True), ("a", "b", "gone"))
        await log.committed()
        clock.now_s += TTL_S - 1
        await store.put(at(clock, "another"))
        assert [await is_stored(store, id) for id in ("a", "b", "c", "gone")] == [True, True, False, False]
        clock.now_s += 70  # Redis keeps ancestors up to a minute longer
        await store.put(at(clock, "one more"))
        assert [await is_stored(store, id) for id in ("a", "b", "another")] == [False, False, True]


@pytest.mark.parametrize("capacity", [{"max_documents": 4}, {"max_bytes": 1300}])
async def test_a_chain_in_use_is_evicted_after_what_is_not(make_storage: MakeStorage, capacity: dict[str, int]) -> None:
    clock = Clock()
    async with opened(make_storage(**capacity), clock) as store:
        for id in "abc":
            await store.put(at(clock, id))
            clock.now_s += 1
        await store.put(at(clock, "d", "a"), ("a",))
        clock.now_s += 1
        await store.put(at(clock, "e"))
        assert [id for id in "abcde" if await is_stored(store, id)] == ["a", "c", "d", "e"]
        clock.now_s += 1
        await store.put(at(clock, "f", "d"), ("a", "d"))
        clock.now_s += 1
        await store.put(at(clock, "g", "f"), ("a", "d", "f"))  # the chain fills the store
        assert [id for id in "adfg" if await is_stored(store, id)] == ["a", "d", "f", "g"]
        clock.now_s += 1
        await store.put(at(clock, "h", "g"), ("a", "d", "f", "g"))
        assert await is_stored(store, "h")


async def test_a_history_has_nothing_but_items_and_output(make_storage: MakeStorage) -> None:
    async with opened(make_storage()) as store:
        await store.put(replace(document("a", body=b"x" * 1000), items=b"[1]", output=b"[2]"))
        (found,) = await store.lineage("", "response", "a", 6)
        assert (found.items, found.output, found.body) == (b"[1]", b"[2]", b"")
        assert (await store.get("", "response", "a")).body == b"x" * 1000
        with pytest.raises(LineageTooLongError):
            await store.lineage("", "response", "a", 5)
        await store.put(document("b", body=b"[3]"))  # by an older server
        assert (await store.get_history("", "response", "b")).body == b"[3]"


async def test_all_events_of_one_turn_are_one_transaction(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = make_storage()
    commit, transactions = storage.commit, list[Sequence[Write]]()

    def counted(writes: Sequence[Write], now_s: float) -> Any:
        transactions.append(writes)
        return commit(writes, now_s)

    monkeypatch.setattr(storage, "commit", counted)
    async with opened(storage) as store:
        logs = [store.begin(document(f"r{index}", is_live=True)) for index in range(8)]
        await asyncio.sleep(0.01)
        before = len(transactions)

        async def produce(index: int) -> None:
            logs[index].append([b"event"], b"")

        await asyncio.gather(*(produce(index) for index in range(8)))
        await logs[0].finish(document("r0"))
        assert len(transactions) - before <= 2
        for log in logs[1:]:
            await log.finish(document(log.id))


async def test_readers_from_any_place_get_each_event_once(make_storage: MakeStorage) -> None:
    async with opened(make_storage()) as store:
        log = store.begin(document("a", is_live=True))
        readers = [asyncio.create_task(events_of(log.journal, after)) for after in range(-1, 12)]
        for first in range(0, 12, 3):
            log.append([b"%d" % (first + index) for index in range(3)], b"")
            await asyncio.sleep(0)
        await log.finish(document("a", body=b"[1]"), [b"12"])
        whole = [(number, b"%d" % number) for number in range(13)]
        for after, reader in enumerate(readers, -1):
            assert await reader == whole[after + 1 :]
        stored = await store.get("", "response", "a")
        assert stored.body == b"[1]" and not stored.is_live
        for after in range(-1, 13):
            assert await events_of(await store.journal(stored), after) == whole[after + 1 :]


async def test_a_log_has_a_bound(make_storage: MakeStorage) -> None:
    async with opened(make_storage(), max_log_bytes=100) as store:
        log = store.begin(document("a", is_live=True))
        failures: list[Exception] = []
        log.on_failure = failures.append
        log.append([b"x" * 90], b"")
        await asyncio.sleep(0.01)
        assert not failures
        log.append([b"x" * 90], b"")
        await asyncio.sleep(0.01)
        assert "more than 100 bytes" in str(failures[0])
        await log.finish(document("a"))


async def test_a_document_ends_once_a_store_that_failed_works_again(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writes: Sequence[Write], now_s: float) -> Collection[str]:
        raise StoreError("no room")

    monkeypatch.setattr("llmbackend.frontends.journals.response_store._END_RETRY_S", 0.01)
    storage = make_storage()
    async with opened(storage) as store:
        log = store.begin(document("a", is_live=True))
        log.append([b"0"], b"")
        await log.committed()
        with monkeypatch.context() as full:
            full.setattr(storage, "commit", fail)
            log.append([b"1"], b"")
            with pytest.raises(StoreError):
                await log.committed()
            log.append([b"2"], b"")
            with pytest.raises(StoreError):
                await log.finish(document("a", body=b'"failed"'), [b"3"])
            await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            while (await store.get("", "response", "a")).is_live:
                await asyncio.sleep(0.01)
        ended = await store.get("", "response", "a")
        assert ended.body == b'"failed"' and await events_of(await store.journal(ended)) == [(0, b"0")]


async def test_a_journal_that_is_nowhere_else_says_what_is_gone() -> None:
    journal = Journal(max_bytes=10)
    journal.publish([b"x" * 5] * 4)
    journal.end()
    assert await events_of(journal, 1) == [(2, b"x" * 5), (3, b"x" * 5)]
    with pytest.raises(EventsGoneError, match="before number 2"):
        await events_of(journal, 0)


async def test_a_quiet_journal_says_so_to_its_readers() -> None:
    journal = Journal(max_bytes=10)
    quiet = journal.follow(quiet_s=0.001)
    assert (await anext(quiet)).parts == ()
    journal.publish([b"a"])
    assert (await anext(quiet)).parts == (b"a",)
    journal.end(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        await anext(quiet)


async def listed(store: ResponseStore, owner: str, limit: int = 2, *, is_descending: bool = False) -> list[str]:
    """The ids of all pages."""
    found: list[str] = []
    has_more = True
    while has_more:
        documents, has_more = await store.page(
            owner, "response", found[-1] if found else None, limit,
            is_descending=is_descending, matches=lambda labels: labels != b"other",
        )  # fmt: skip
        assert 0 < len(documents) <= limit or not found
        found += [one.id for one in documents]
    return found


async def test_lists_are_in_order_of_creation_and_of_ids(make_storage: MakeStorage) -> None:
    """Also where several were created at once, and whatever was put again or removed."""
    async with opened(make_storage()) as store:
        times = {"c": 1.25, "a": 2.0, "b": 2.0, "e": 2.0, "d": 3.5}
        for id, at_s in times.items():
            made = replace(document(id, "o"), created_s=NOW_S + at_s, labels=b"own")
            await store.put(made)
            await store.put(replace(made, body=b"{1}"))
        await store.put(document("unlisted", "o"))
        await store.put(replace(document("filtered", "o"), labels=b"other"))
        await store.put(replace(document("theirs", "p"), labels=b"own"))
        await store.put(replace(document("of another kind", "o"), kind="conversation", labels=b"own"))
        for limit in (1, 2, 3, 9):
            assert await listed(store, "o", limit) == ["c", "a", "b", "e", "d"]
            assert await listed(store, "o", limit, is_descending=True) == ["d", "e", "b", "a", "c"]
        assert await listed(store, "p") == ["theirs"] and await listed(store, "nobody") == []
        await store.delete("o", "response", "b")
        assert await listed(store, "o") == ["c", "a", "e", "d"]
        with pytest.raises(NotStoredError):
            await store.page("o", "response", "b", 2, is_descending=False, matches=bool)


def test_a_list_continues_behind_a_document_that_was_removed(make_storage: MakeStorage) -> None:
    storage = make_storage()
    entries = [Entry(NOW_S + at_s, id, b"x") for at_s, id in ((1.0, "b"), (2.0, "a"), (2.0, "c"), (3.0, "d"))]
    documents = [replace(document(one.id), created_s=one.created_s, labels=one.labels) for one in entries]
    storage.commit([Put(one) for one in documents], NOW_S)
    gone = entries[1]
    assert storage.listed("", gone, 9, is_descending=False) == entries[2:]
    storage.commit([Delete(gone.id)], NOW_S)
    assert storage.listed("", gone, 9, is_descending=False) == entries[2:]
    assert storage.listed("", gone, 9, is_descending=True) == entries[:1]
    storage.close()
