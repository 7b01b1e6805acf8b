"""The SQLite store: what a process that was killed leaves behind, and what another one makes of it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from llmbackend.frontends.journals import sqlite_storage
from llmbackend.frontends.journals.documents import Append, Capacity, Document, Put, StoreError
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.sqlite_storage import SqliteStorage
from llmbackend.frontends.journals.store_settings import StoreSettings

from .test_response_store import Clock, Collecting, document, events_of, opened

CAPACITY = Capacity(1 << 20, 100)
_WRITER = """
import sys
from pathlib import Path
from llmbackend.frontends.journals import sqlite_storage
from llmbackend.frontends.journals.documents import Append, Capacity, Document, Put
from llmbackend.frontends.journals.sqlite_storage import SqliteStorage

storage = SqliteStorage(Path(sys.argv[1]), Capacity(1 << 20, 100))
live = Document("", "response", "a", b"{}", 0.0, 1e12, is_live=True, continuation=b"how to go on")
storage.commit([Put(live)], 1.0)
for number in range(100_000):
    storage.commit([Append("a", number, (b"%d" % number,), b"%d" % number)], 1.0)
    print(number, flush=True)
"""


def test_what_was_committed_is_there_after_a_kill(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path / "store"], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    shown = [writer.stdout.readline() for _ in range(25)]
    writer.send_signal(signal.SIGKILL)
    rest = writer.communicate()[0].splitlines()
    last = int((rest or shown)[-1])
    storage = SqliteStorage(tmp_path / "store", CAPACITY)
    [found] = storage.live()
    assert found.continuation == b"how to go on"
    count = storage.num_events("a")
    assert count in (last + 1, last + 2)  # one more may have been committed before it was printed
    numbers = [b"%d" % number for number in range(count)]
    assert storage.events("a", 0, 1 << 20) == numbers == storage.progress("a")
    storage.close()


def test_events_are_read_from_any_number_in_pieces(tmp_path: Path) -> None:
    storage = SqliteStorage(tmp_path / "store", CAPACITY)
    storage.commit([Put(document("a", is_live=True))], 1.0)
    events = [b"%03d" % number for number in range(60)]
    for first in range(0, 60, 4):
        storage.commit(
            [Append("a", first, tuple(events[first : first + 4]), b""), Append("a", first + 4, (), b"p")], 1.0
        )
    for first in range(60):
        piece = storage.events("a", first, 10)
        assert piece and piece == events[first : first + len(piece)]
    assert storage.events("a", 60, 10) == []
    assert storage.progress("a") == [b"p"] * 15
    storage.close()


def test_another_process_goes_on_with_a_log(tmp_path: Path) -> None:
    live = replace(document("a", is_live=True), continuation=b"request")

    async def first() -> None:
        async with opened(SqliteStorage(tmp_path / "store", CAPACITY)) as store:
            log = store.begin(live)
            log.append([b"0", b"1"], b"first step")
            log.append([], b"second step")
            log.append([b"2"], b"third step")

    async def second() -> None:
        storage = SqliteStorage(tmp_path / "store", CAPACITY)
        store = ResponseStore(storage, 100.0, Clock())
        producer = store.producer = Collecting()
        await store.start()
        [found] = producer.found
        assert found == live
        log, progress = await store.resume(found)
        assert progress == [b"first step", b"second step", b"third step"]
        reader = asyncio.create_task(events_of(log.journal))
        log.append([b"3"], b"fourth step")
        await log.finish(replace(live, body=b"[]"), [b"4"])
        assert await reader == [(number, b"%d" % number) for number in range(5)]
        assert storage.progress("a") == []
        await store.close()

    async def third() -> None:
        store = ResponseStore(SqliteStorage(tmp_path / "store", CAPACITY), 100.0, Clock())
        producer = store.producer = Collecting()
        await store.start()
        assert producer.found == []
        found = await store.get("", "response", "a")
        assert (found.body, found.is_live) == (b"[]", False)
        assert [part for _, part in await events_of(await store.journal(found), 2)] == [b"3", b"4"]
        await store.close()

    for run in (first, second, third):
        asyncio.run(run())


async def test_readers_far_behind_read_what_memory_no_longer_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbackend.frontends.journals.response_store.HELD_EVENT_BYTES", 8)
    monkeypatch.setattr("llmbackend.frontends.journals.response_store._LOAD_BYTES", 16)
    async with opened(SqliteStorage(tmp_path / "store", CAPACITY)) as store:
        log = store.begin(document("a", is_live=True))
        for number in range(50):
            log.append([b"%d" % number], b"p")
        readers = [asyncio.create_task(events_of(log.journal, after)) for after in (-1, 20, 49)]
        await log.finish(document("a"), [b"50"])
        for after, reader in zip((-1, 20, 49), readers, strict=True):
            assert await reader == [(number, b"%d" % number) for number in range(after + 1, 51)]


def test_held_bytes_are_what_is_in_the_file(tmp_path: Path) -> None:
    storage = SqliteStorage(tmp_path / "store", CAPACITY)
    storage.commit([Put(document("a", is_live=True)), Append("a", 0, (b"x" * 10,), b"y" * 100)], 1.0)
    storage.commit([Put(document("a"))], 1.0)
    held = storage.held_bytes
    assert held == document("a").size_bytes + len(msgspec.msgpack.encode([b"x" * 10]))
    storage.close()
    assert SqliteStorage(tmp_path / "store", CAPACITY).held_bytes == held


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_earlier_version_is_used(tmp_path: Path, version: int) -> None:
    with sqlite3.connect(tmp_path / "store") as before:
        for statement in "".join((sqlite_storage._SCHEMA, sqlite_storage._SINCE_VERSION_2)[:version]).split(";"):
            before.execute(statement)
        row = ("a", "o", "response", b"{}", 1.0, 1e9, b"[]", "", 0, b"", 8, 0)
        names = [name for _, name, *_ in before.execute("PRAGMA table_info(documents)")][: len(row)]
        before.execute(f"INSERT INTO documents ({', '.join(names)}) VALUES (?{', ?' * 11})", row)
        before.execute(f"PRAGMA user_version = {version}")
    before.close()
    old = Document("o", "response", "a", b"{}", 1.0, 1e9)
    for _ in range(2):
        storage = SqliteStorage(tmp_path / "store", CAPACITY)
        assert storage.get("a", 1.0) == storage.get_history("a", 1.0) == old
        assert storage.listed("o", None, 9, is_descending=False) == []
        assert (storage.held_bytes, storage.next_expiry_s()) == (8, 1e9)
        storage.close()
    storage = SqliteStorage(tmp_path / "store", CAPACITY)
    storage.commit([Put(replace(old, id="b", expires_s=2e9), ("a",))], 1.0)
    assert storage.get("a", 1.5e9) == replace(old, expires_s=2e9)
    storage.commit([], 2e9)
    assert (storage.held_bytes, storage.next_expiry_s()) == (0, None)
    storage.close()


def test_files_that_can_not_be_used_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbackend.frontends.journals.sqlite_storage._LOCK_WAIT_S", 0.01)
    storage = SqliteStorage(tmp_path / "store", CAPACITY)
    assert stat.S_IMODE(os.stat(tmp_path / "store").st_mode) == 0o600
    storage.commit([], 1.0)
    with pytest.raises(StoreError, match="store' is in use by another process"):
        SqliteStorage(tmp_path / "store", CAPACITY)
    storage.close()
    with sqlite3.connect(tmp_path / "later") as later:
        later.execute("PRAGMA user_version = 4")
    later.close()
    with pytest.raises(StoreError, match="has version 4, this server reads version 3"):
        SqliteStorage(tmp_path / "later", CAPACITY)
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(StoreError, match="not a database"):
        SqliteStorage(tmp_path / "text", CAPACITY)
    with pytest.raises(StoreError, match="cannot be opened"):
        SqliteStorage(tmp_path / "missing" / "store", CAPACITY)


async def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    storage = SqliteStorage(tmp_path / "store", CAPACITY)
    async with opened(storage) as store:
        log = store.begin(document("a", is_live=True))
        failures: list[Exception] = []
        log.on_failure = failures.append
        log.append([b"0"], b"p")
        while log.journal.next_number < 1:
            await asyncio.sleep(0.001)
        held = storage.held_bytes
        storage._connection.execute("PRAGMA query_only = ON")
        log.append([b"1"], b"p")
        with pytest.raises(StoreError, match="readonly"):
            await log.finish(document("a"))
        storage._connection.execute("PRAGMA query_only = OFF")
        storage.commit([], 1.0)
        assert storage.held_bytes == held
        assert log.journal.next_number == 1 and failures


def test_a_full_disk_removes_no_documents(tmp_path: Path) -> None:
    storage = SqliteStorage(tmp_path / "store", CAPACITY)
    storage.commit([Put(document("a"))], 1.0)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size_bytes = max(file.stat().st_size for file in tmp_path.iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
        for _ in range(4):
            with pytest.raises(StoreError):
                storage.commit([Put(replace(document("b"), body=bytes(CAPACITY.max_bytes // 2)))], 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    storage.commit([Put(document("c"))], 1.0)
    assert storage.get("a", 1.0) is not None
    storage.close()


def test_settings() -> None:
    with pytest.raises(ValueError, match="'file:x', expected memory, sqlite:PATH, or redis://"):
        StoreSettings(url="file:x")
    with pytest.raises(ValueError, match="'sqlite:', expected"):
        StoreSettings(url="sqlite:")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_deleted_under_the_server_is_noticed(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "store"
    storage = SqliteStorage(path, CAPACITY)
    storage.commit([Put(document("a"))], 1.0)
    path.rename(tmp_path / "gone")
    if is_replaced:
        path.write_bytes((tmp_path / "gone").read_bytes())
    with pytest.raises(StoreError, match="was removed or replaced"):
        storage.get("a", 1.0)
    with pytest.raises(StoreError, match="was removed or replaced"):
        storage.commit([Put(document("b"))], 1.0)
    storage.close()


def test_sqlites_name_for_memory_is_the_store_in_memory() -> None:
    settings = StoreSettings(url="sqlite::memory:")
    assert settings == StoreSettings() and not settings.open_storage().is_persistent
    assert not Path(":memory:").exists()
