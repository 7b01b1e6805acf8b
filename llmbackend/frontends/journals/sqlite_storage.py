"""Documents in SQLite: in memory, or in the file of `--response-store sqlite:PATH`.

Invariants: one process uses the file, which only its user can read; what was committed survives a kill of the process
(WAL, synchronous=NORMAL: after a power failure the last transactions may be missing, but the file is consistent).
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from .documents import Append, Capacity, Delete, Document, Entry, Put, StoreError, Write

_VERSION: Final = 3
_LOCK_WAIT_S: Final = 2.0
_OLDEST: Final = "WHERE is_live = 0 ORDER BY used_s, rowid LIMIT 32"
_SCHEMA: Final = """
CREATE TABLE documents (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, created_s REAL NOT NULL,
    expires_s REAL NOT NULL, items BLOB NOT NULL, parent TEXT NOT NULL, is_live INTEGER NOT NULL,
    continuation BLOB NOT NULL, size_bytes INTEGER NOT NULL, log_bytes INTEGER NOT NULL
);
CREATE INDEX by_expiry ON documents (expires_s);
CREATE INDEX by_age ON documents (is_live, created_s, size_bytes, log_bytes, owner);
CREATE INDEX by_owner ON documents (owner, is_live, created_s);
CREATE TABLE events (step INTEGER PRIMARY KEY, id TEXT NOT NULL, first INTEGER NOT NULL, parts BLOB NOT NULL);
CREATE UNIQUE INDEX events_of ON events (id, first);
CREATE TABLE progress (step INTEGER PRIMARY KEY, id TEXT NOT NULL, progress BLOB NOT NULL);
CREATE INDEX progress_of ON progress (id, step);
"""
_SINCE_VERSION_2: Final = """
ALTER TABLE documents ADD COLUMN labels BLOB NOT NULL DEFAULT x'';
CREATE INDEX by_list ON documents (owner, created_s, id) WHERE labels <> x'';
"""
_SINCE_VERSION_3: Final = """
ALTER TABLE documents ADD COLUMN output BLOB NOT NULL DEFAULT x'';
CREATE TABLE uses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, is_live INTEGER NOT NULL, used_s REAL NOT NULL, expires_s REAL NOT NULL
);
INSERT INTO uses SELECT id, owner, is_live, created_s, expires_s FROM documents;
CREATE INDEX uses_by_expiry ON uses (expires_s);
CREATE INDEX uses_by_age ON uses (is_live, used_s);
CREATE INDEX uses_by_owner ON uses (owner, is_live, used_s);
DROP INDEX by_expiry;
DROP INDEX by_age;
DROP INDEX by_owner;
CREATE INDEX by_size ON documents (size_bytes);
"""
"""`uses` has what changes when a response is continued: SQLite rewrites whole rows."""
_LOG_BYTES: Final = (
    "(SELECT COALESCE(SUM(LENGTH(parts)), 0) FROM events WHERE id = ?1) + "
    "(SELECT COALESCE(SUM(LENGTH(progress)), 0) FROM progress WHERE id = ?1)"
)
_HELD_BYTES: Final = (
    "SELECT (SELECT COALESCE(SUM(size_bytes), 0) FROM documents) + (SELECT COALESCE(SUM(LENGTH(parts)), 0) FROM events)"
    " + (SELECT COALESCE(SUM(LENGTH(progress)), 0) FROM progress)"
)
_FIELDS: Final = "owner, kind, id, body, created_s, expires_s, items, parent, is_live, continuation, labels, output"
_NAMES: Final = _FIELDS.split(", ")
_SELECTED: Final = ", ".join(("uses." if name == "expires_s" else "documents.") + name for name in _NAMES)
_READ: Final = f"SELECT {_SELECTED} FROM documents JOIN uses USING (id)"
_READ_HISTORY: Final = _READ.replace("documents.body", "CASE output WHEN x'' THEN body ELSE x'' END")
_PARTS = msgspec.msgpack.Decoder(list[bytes])


class SqliteStorage:
    """A Storage."""

    takeover_interval_s: float | None = None
    timeout_s: float | None = None

    def __init__(self, path: Path | None, capacity: Capacity) -> None:
        """Opens or creates the file; without a path, documents are stored in memory. Raises StoreError."""
        self._path = path
        self._capacity = capacity
        self.is_persistent = path is not None
        self._count_of: Counter[str] = Counter()
        """Documents by owner."""
        self.held_bytes = 0
        self._is_counted = False
        """Whether `_count_of` and `held_bytes` are those of the file: not after a failed transaction."""
        self._connection = self._opened()
        self._file = _identity(path)
        try:
            with self._errors():
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        with self._errors(), self._transaction():
            if not self._is_counted:
                self._count()
            for write in writes:
                self._write(write, now_s)
            for id in self._ids("WHERE expires_s <= ?", now_s):
                self._remove(id)
            self._evict({write.document.owner for write in writes if isinstance(write, Put)})
        return ()

    def get(self, id: str, now_s: float) -> Document | None:
        return self._read(_READ, id, now_s)

    def get_history(self, id: str, now_s: float) -> Document | None:
        return self._read(_READ_HISTORY, id, now_s)

    def _read(self, query: str, id: str, now_s: float) -> Document | None:
        with self._errors():
            found = self._rows(f"{query} WHERE id = ? AND uses.expires_s > ?", id, now_s)
            return _document(found[0]) if found else None

    def num_events(self, id: str) -> int:
        with self._errors():
            last = self._rows("SELECT first, parts FROM events WHERE id = ? ORDER BY first DESC LIMIT 1", id)
            return last[0][0] + len(_PARTS.decode(last[0][1])) if last else 0

    def events(self, id: str, first: int, max_bytes: int) -> list[bytes]:
        found: list[bytes] = []
        with self._errors():
            begins = "(SELECT MAX(first) FROM events WHERE id = ?1 AND first <= ?2)"
            query = f"SELECT first, parts FROM events WHERE id = ?1 AND first >= {begins} ORDER BY first"
            cursor = self._connection.execute(query, (id, first))
            for number, packed in cursor:
                found += _PARTS.decode(packed)[max(first - number, 0) :]
                max_bytes -= len(packed)
                if found and max_bytes <= 0:
                    break
            cursor.close()
        return found

    def progress(self, id: str) -> list[bytes]:
        with self._errors():
            return [row[0] for row in self._rows("SELECT progress FROM progress WHERE id = ? ORDER BY step", id)]

    def live(self) -> list[Document]:
        with self._errors():
            return [_document(row) for row in self._rows(f"{_READ} WHERE uses.is_live = 1")]

    def listed(self, owner: str, after: Entry | None, most: int, *, is_descending: bool) -> list[Entry]:
        order, behind = ("DESC", "<") if is_descending else ("ASC", ">")
        place, values = ("", ()) if after is None else (f"AND (created_s, id) {behind} (?, ?)", after[:2])
        query = (
            f"SELECT created_s, id, labels FROM documents WHERE owner = ? AND labels <> x'' {place} "
            f"ORDER BY created_s {order}, id {order} LIMIT ?"
        )
        with self._errors():
            return [Entry(*row) for row in self._rows(query, owner, *values, most)]

    def next_expiry_s(self) -> float | None:
        with self._errors():
            expiry: float | None = self._rows("SELECT MIN(expires_s) FROM uses")[0][0]
            return expiry

    def close(self) -> None:
        self._connection.close()

    # --- writes -----------------------------------------------------------------------------------------------------

    def _write(self, write: Write, now_s: float) -> None:
        match write:
            case Put(document, ancestors, _):
                self._put(document, now_s)
                self._connection.executemany(
                    "UPDATE uses SET used_s = MAX(used_s, ?), expires_s = MAX(expires_s, ?) WHERE id = ?",
                    ((document.created_s, document.expires_s, id) for id in ancestors),
                )
            case Append():
                self._append(write)
            case Delete(id):
                self._remove(id)

    def _put(self, document: Document, now_s: float) -> None:
        if not self.is_persistent:
            document = replace(document, continuation=b"")  # no other process can continue it
        before = self._rows("SELECT size_bytes FROM documents WHERE id = ?", document.id)
        self.held_bytes += document.size_bytes - (before[0][0] if before else 0)
        self._count_of[document.owner] += not before
        self._connection.execute(
            f"INSERT INTO documents ({_FIELDS}, size_bytes, log_bytes) VALUES (?{', ?' * len(_NAMES)}, 0) "
            "ON CONFLICT (id) DO UPDATE SET body = excluded.body, items = excluded.items, is_live = excluded.is_live, "
            "continuation = excluded.continuation, labels = excluded.labels, output = excluded.output, "
            "size_bytes = excluded.size_bytes",
            (*(getattr(document, name) for name in _NAMES), document.size_bytes),
        )
        self._connection.execute(
            "INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?, ?)",
            (document.id, document.owner, document.is_live, now_s, document.expires_s),
        )
        if before and not document.is_live:
            self._drop_progress(document.id)

    def _drop_progress(self, id: str) -> None:
        self.held_bytes -= self._rows("SELECT COALESCE(SUM(LENGTH(progress)), 0) FROM progress WHERE id = ?", id)[0][0]
        self._connection.execute("DELETE FROM progress WHERE id = ?", (id,))

    def _append(self, step: Append) -> None:
        """Does not touch the document's row, because SQLite would rewrite it entirely."""
        if not self._rows("SELECT 1 FROM documents WHERE id = ?", step.id):
            return  # it was deleted
        if step.events:
            parts = msgspec.msgpack.encode(step.events)
            self.held_bytes += len(parts)
            self._connection.execute(
                "INSERT INTO events (id, first, parts) VALUES (?, ?, ?)", (step.id, step.first, parts)
            )
        if step.progress and self.is_persistent:
            self.held_bytes += len(step.progress)
            self._connection.execute("INSERT INTO progress (id, progress) VALUES (?, ?)", (step.id, step.progress))

    def _remove(self, id: str) -> None:
        found = self._rows(f"SELECT owner, size_bytes, {_LOG_BYTES} FROM documents WHERE id = ?1", id)
        if not found:
            return
        owner, size_bytes, log_bytes = found[0]
        self.held_bytes -= size_bytes + log_bytes
        self._count_of[owner] -= 1
        for table in ("documents", "uses", "events", "progress"):
            self._connection.execute(f"DELETE FROM {table} WHERE id = ?", (id,))

    def _evict(self, owners: Collection[str]) -> None:
        """Removes the documents beyond the capacity that were unused for longest."""
        for owner in owners:
            excess = self._count_of[owner] - self._capacity.max_documents_per_owner
            if excess > 0:
                for id in self._ids("WHERE owner = ? AND is_live = 0 ORDER BY used_s, rowid LIMIT ?", owner, excess):
                    self._remove(id)
        while self._is_too_large and (oldest := self._ids(_OLDEST)):
            for id in oldest:
                if self._is_too_large:
                    self._remove(id)

    @property
    def _is_too_large(self) -> bool:
        return self.held_bytes > self._capacity.max_bytes

    # --- the file ---------------------------------------------------------------------------------------------------

    def _opened(self) -> sqlite3.Connection:
        try:
            if self._path is not None:
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            name = self._path or ":memory:"
            return sqlite3.connect(name, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the response store '{self._path}' cannot be opened: {error}") from None

    def _prepare(self) -> None:
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
            self._connection.execute(f"PRAGMA {pragma}")
        with self._transaction():
            version = self._rows("PRAGMA user_version")[0][0]
            if version not in range(_VERSION + 1):
                raise StoreError(
                    f"the response store '{self._path}' has version {version}, this server reads version {_VERSION}; "
                    "use another file"
                )
            for statement in "".join((_SCHEMA, _SINCE_VERSION_2, _SINCE_VERSION_3)[version:]).split(";"):
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {_VERSION}")
        self._count()

    def _count(self) -> None:
        self.held_bytes = self._rows(_HELD_BYTES)[0][0]
        self._count_of = Counter(dict(self._rows("SELECT owner, COUNT(*) FROM uses GROUP BY owner")))
        self._is_counted = True

    def _ids(self, condition: str, *values: Any) -> list[str]:
        return [row[0] for row in self._rows(f"SELECT id FROM uses {condition}", *values)]

    def _rows(self, query: str, *values: Any) -> list[Any]:
        return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            self._is_counted = False
            if self._connection.in_transaction:  # after a full disk, SQLite itself has rolled back
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if _identity(self._path) != self._file:  # SQLite would continue to use the deleted file
            raise StoreError(f"the response store '{self._path}' was removed or replaced; restart the server")
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise StoreError(f"the response store '{self._path}' is in use by another process") from None
            raise StoreError(f"the response store '{self._path}' failed: {error}") from None
        except sqlite3.Error as error:
            raise StoreError(f"the response store '{self._path}' failed: {error}") from None


def _identity(path: Path | None) -> tuple[int, int] | None:
    """None: there is no such file."""
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _document(row: Sequence[Any]) -> Document:
    fields = dict(zip(_NAMES, row, strict=True))
    return Document(**fields | {"is_live": bool(fields["is_live"])})
