"""Documents in a Redis server, which several servers may share, for `--response-store redis://…`.

Invariants: each live document is written by one server; when that server's lease expires, the first other one that
calls `live` takes its documents over; a commit is one MULTI/EXEC.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .documents import Append, Capacity, Delete, Document, Entry, Put, StoreError, Write

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

LEASE_S: Final = 5
"""A server whose lease was not renewed for this long counts as dead; on the same machine, also when its process is
gone. If it is alive after all, its writes to documents that were taken over are refused."""
_RENEW_INTERVAL_S: Final = 1.5
_TAKEOVER_INTERVAL_S: Final = 1.0
_ATTEMPTS: Final = 5
_TIMEOUT_S: Final = 5.0
_EXPIRY_MARGIN_S: Final = 3600
"""Redis removes a document's keys this long after its expiry, if no server has."""
_LEEWAY_S: Final = 60.0
"""How much longer an ancestor is kept than asked, so that not every turn of a chain has to extend all of them."""
_REMOVAL_BATCH: Final = 64
_PREFIX: Final = "llmbackend:responses:"
_VERSION: Final = 1
"""Version of the keys and values, stored under the key `version`. Data from before versioning counts as version 1."""
_SETS_OF_OWNERS: Final = ("owned", "listed", "finished-of")
_FIELDS: Final = (
    *("owner", "kind", "id", "body", "created_s", "expires_s", "items", "parent", "is_live", "continuation"),
    *("labels", "output"),
)


@dataclass(slots=True)
class _Stored:
    """Sizes of a document before a write of a transaction, whose commands Redis executes at its end."""

    owner: str
    is_live: bool = False
    expires_s: float = 0.0
    document_bytes: int = 0
    log_bytes: int = 0
    """Of its events and its progress."""
    progress_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.document_bytes + self.log_bytes


class RedisStorage:
    """A Storage."""

    is_persistent = True
    takeover_interval_s: float | None = _TAKEOVER_INTERVAL_S
    timeout_s: float | None = 1.0

    def __init__(self, url: str, capacity: Capacity) -> None:
        """Connects. Raises StoreError."""
        self._capacity = capacity
        self._is_recount_due = False
        """Whether Redis has removed documents, whose bytes are still counted."""
        self._claimed: set[str] = set()
        """Live documents that this server may have claimed, and that `live` has yet to return."""
        self._instance = f"{_machine()}|{os.getpid()}|{uuid.uuid4().hex}"
        self._shown = url.rpartition("@")[2]
        self._redis = _client(url)
        with self._errors():
            self._check_version()
            self._renew()
        self._closing = threading.Event()
        self._renewer = threading.Thread(target=self._keep_lease, name="response-store-lease", daemon=True)
        self._renewer.start()

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        with self._errors():
            refused = self._written(writes, now_s)
            due = self._redis.zrangebyscore(_key("expiry"), 0, now_s, 0, _REMOVAL_BATCH)
            self._remove(due, now_s)
            if self._is_recount_due and len(due) < _REMOVAL_BATCH:
                self._recount()
            for owner in {write.document.owner for write in writes if isinstance(write, Put)}:
                excess = self._redis.zcard(_key("owned", owner)) - self._capacity.max_documents_per_owner
                if excess > 0:
                    self._remove(self._redis.zrange(_key("finished-of", owner), 0, excess - 1), now_s, owner)
            if int(self._redis.get(_key("bytes")) or 0) > self._capacity.max_bytes:
                self._evict(now_s)
        return refused

    def get(self, id: str, now_s: float) -> Document | None:
        with self._errors():
            return _unexpired(self._document(id), now_s)

    def get_history(self, id: str, now_s: float) -> Document | None:
        with self._errors():
            document = self._document(id, has_body=False)
            if document is not None and not document.output:
                document = self._document(id)
            return _unexpired(document, now_s)

    def num_events(self, id: str) -> int:
        with self._errors():
            return int(self._redis.llen(_key("events", id)))

    def events(self, id: str, first: int, max_bytes: int) -> list[bytes]:
        found: list[bytes] = []
        with self._errors():
            while max_bytes > 0:
                start = first + len(found)
                some: list[bytes] = self._redis.lrange(_key("events", id), start, start + _REMOVAL_BATCH - 1)
                if not some:
                    break
                found += some
                max_bytes -= sum(map(len, some))
        return found

    def progress(self, id: str) -> list[bytes]:
        with self._errors():
            return list(self._redis.lrange(_key("progress", id), 0, -1))

    def live(self) -> list[Document]:
        with self._errors():
            writers: dict[bytes, bytes] = self._redis.hgetall(_key("live"))
            ended = {writer for writer in set(writers.values()) if self._has_ended(writer.decode())}
            for key, writer in writers.items():
                if writer in ended:
                    self._claim(key.decode(), writer)
            own = self._claimed - self._written_by_others(self._claimed)
            documents = [(id, self._document(id)) for id in own]
            for id, found in documents:
                if found is None or not found.is_live:  # it ended in the meantime
                    self._redis.hdel(_key("live"), id)
            self._claimed = set()
            return [found for _, found in documents if found is not None and found.is_live]

    def listed(self, owner: str, after: Entry | None, most: int, *, is_descending: bool) -> list[Entry]:
        key = _key("listed", owner)
        with self._errors():
            begin = 0 if after is None else self._rank_after(key, after, is_descending=is_descending)
            found = self._redis.zrange(key, begin, begin + most - 1, desc=is_descending, withscores=True)
            with self._redis.pipeline(transaction=False) as pipe:
                for id, _ in found:
                    pipe.hget(_key("doc", id.decode()), "labels")
                labels = pipe.execute()
        return [Entry(at_s, id.decode(), one or b"") for (id, at_s), one in zip(found, labels, strict=True)]

    def _rank_after(self, key: str, entry: Entry, *, is_descending: bool) -> int:
        rank = self._redis.zrevrank(key, entry.id) if is_descending else self._redis.zrank(key, entry.id)
        if rank is not None:
            return int(rank) + 1
        # The document was removed in the meantime.
        beyond = (f"({entry.created_s!r}", "+inf") if is_descending else ("-inf", f"({entry.created_s!r}")
        id, at_once = entry.id.encode(), self._redis.zrangebyscore(key, entry.created_s, entry.created_s)
        before = [one for one in at_once if (one > id if is_descending else one < id)]
        return int(self._redis.zcount(key, *beyond)) + len(before)

    def next_expiry_s(self) -> float | None:
        with self._errors():
            first = self._redis.zrange(_key("expiry"), 0, 0, withscores=True)
            return float(first[0][1]) if first else None

    def close(self) -> None:
        self._closing.set()
        self._renewer.join()
        try:
            self._redis.delete(_key("instance", self._instance))
        except Exception:  # the lease expires by itself
            return
        finally:
            self._redis.connection_pool.disconnect()

    # --- writes -----------------------------------------------------------------------------------------------------

    def _written(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        """Returns the ids of documents that another server writes. Retries when a document changes during the
        transaction. Raises redis.RedisError."""
        import redis

        ids = {write.id for write in writes}
        ancestors = {id for write in writes if isinstance(write, Put) for id in write.ancestors}
        for attempt in range(_ATTEMPTS):
            with self._redis.pipeline(transaction=True) as pipe:
                if ids:
                    pipe.watch(*(_key("doc", id) for id in ids | ancestors))
                refused = self._written_by_others(ids)
                own = [write for write in writes if type(write) is Delete or write.id not in refused]
                held = self._sizes({write.id for write in own} | ancestors)
                pipe.multi()
                self._add(pipe, own, held, now_s)
                try:
                    pipe.execute()
                    return refused
                except redis.WatchError:
                    if attempt == _ATTEMPTS - 1:
                        raise
        return ()

    def _add(self, pipe: Pipeline, writes: Sequence[Write], held: dict[str, _Stored], now_s: float) -> None:
        for write in writes:
            match write:
                case Put(document, ancestors, is_end) if not is_end or _is_live(held, document.id):
                    self._put(pipe, document, held.setdefault(document.id, _Stored(document.owner)), now_s)
                    for id in ancestors:
                        if id in held:
                            self._continue(pipe, id, held[id], document)
                case Append() if _is_live(held, write.id):
                    self._append(pipe, write, held[write.id])
                case Delete(id) if id in held:
                    self._delete(pipe, id, held.pop(id))

    def _written_by_others(self, ids: set[str]) -> set[str]:
        """Those of the documents that another server writes."""
        ordered = sorted(ids)
        writers = self._redis.hmget(_key("live"), ordered) if ordered else []
        own = (None, self._instance.encode())
        return {id for id, writer in zip(ordered, writers, strict=True) if writer not in own}

    def _sizes(self, ids: Collection[str]) -> dict[str, _Stored]:
        """Those that exist."""
        ordered = sorted(ids)
        names = ("owner", "is_live", "expires_s", "size_bytes", "log_bytes", "progress_bytes")
        with self._redis.pipeline(transaction=False) as pipe:
            for id in ordered:
                pipe.hmget(_key("doc", id), *names)
            rows = pipe.execute()
        return {
            id: _Stored(owner.decode(), is_live == b"1", float(expires_s), *(int(size or 0) for size in sizes))
            for id, (owner, is_live, expires_s, *sizes) in zip(ordered, rows, strict=True)
            if owner is not None
        }

    def _put(self, pipe: Pipeline, document: Document, stored: _Stored, now_s: float) -> None:
        id, key = document.id, _key("doc", document.id)
        fields = {name: getattr(document, name) for name in _FIELDS} | {"is_live": int(document.is_live)}
        if stored.progress_bytes and not document.is_live:
            pipe.hincrby(key, "log_bytes", -stored.progress_bytes)
            pipe.hdel(key, "progress_bytes")
            pipe.decrby(_key("bytes"), stored.progress_bytes)
            stored.log_bytes, stored.progress_bytes = stored.log_bytes - stored.progress_bytes, 0
        pipe.hset(key, mapping={**fields, "size_bytes": document.size_bytes})
        pipe.incrby(_key("bytes"), document.size_bytes - stored.document_bytes)
        stored.document_bytes, stored.expires_s = document.size_bytes, document.expires_s
        stored.is_live = document.is_live
        pipe.zadd(_key("expiry"), {id: document.expires_s})
        pipe.zadd(_key("owned", document.owner), {id: document.created_s})
        if document.labels:
            pipe.zadd(_key("listed", document.owner), {id: document.created_s})
        if document.is_live:
            pipe.hset(_key("live"), id, self._instance)
        else:
            pipe.hdel(_key("live"), id)
            pipe.delete(_key("progress", id))
            self._use(pipe, id, document.owner, now_s)
        self._expire(pipe, id, document.expires_s)

    def _continue(self, pipe: Pipeline, id: str, stored: _Stored, document: Document) -> None:
        """id: of an ancestor of `document`"""
        self._use(pipe, id, stored.owner, document.created_s)
        if document.expires_s > stored.expires_s:
            stored.expires_s = document.expires_s + _LEEWAY_S
            pipe.hset(_key("doc", id), "expires_s", stored.expires_s)
            pipe.zadd(_key("expiry"), {id: stored.expires_s})
            self._expire(pipe, id, stored.expires_s)

    @staticmethod
    def _expire(pipe: Pipeline, id: str, expires_s: float) -> None:
        for name in ("doc", "events", "progress"):
            pipe.expireat(_key(name, id), int(expires_s) + _EXPIRY_MARGIN_S)

    @staticmethod
    def _use(pipe: Pipeline, id: str, owner: str, used_s: float) -> None:
        """Those that were unused for longest are evicted first."""
        pipe.zadd(_key("finished"), {id: used_s})
        pipe.zadd(_key("finished-of", owner), {id: used_s})

    def _append(self, pipe: Pipeline, step: Append, stored: _Stored) -> None:
        if step.events:
            pipe.rpush(_key("events", step.id), *step.events)
        if step.progress:
            pipe.rpush(_key("progress", step.id), step.progress)
            pipe.hincrby(_key("doc", step.id), "progress_bytes", len(step.progress))
        pipe.hincrby(_key("doc", step.id), "log_bytes", step.size_bytes)
        pipe.incrby(_key("bytes"), step.size_bytes)
        stored.log_bytes += step.size_bytes
        stored.progress_bytes += len(step.progress)
        if not step.first:  # lists are created by their first push
            self._expire(pipe, step.id, stored.expires_s)

    def _delete(self, pipe: Pipeline, id: str, stored: _Stored) -> None:
        pipe.delete(*(_key(name, id) for name in ("doc", "events", "progress")))
        pipe.hdel(_key("live"), id)
        for name in (("expiry",), ("finished",), *((name, stored.owner) for name in _SETS_OF_OWNERS)):
            pipe.zrem(_key(*name), id)
        pipe.decrby(_key("bytes"), stored.size_bytes)

    def _remove(self, ids: Sequence[bytes], now_s: float, owner: str = "") -> None:
        """owner: of all of them, if known. Removes none if other servers change them all the time."""
        import redis

        if not ids:
            return
        names = {id.decode() for id in ids}
        for _ in range(_ATTEMPTS):
            with self._redis.pipeline(transaction=True) as pipe, suppress(redis.WatchError):
                pipe.watch(*(_key("doc", id) for id in names))  # removed twice, they would be subtracted twice
                stored = self._sizes(names)
                gone = names - stored.keys()
                for id in gone:  # another server has removed it; or Redis has, since no server ran when it expired
                    expires_s = self._redis.zscore(_key("expiry"), id)
                    self._is_recount_due |= expires_s is not None and expires_s + _EXPIRY_MARGIN_S <= now_s
                pipe.multi()
                for id, one in stored.items():
                    self._delete(pipe, id, one)
                for id in gone:
                    self._delete(pipe, id, _Stored(owner))
                pipe.execute()
                return

    def _recount(self) -> None:
        """Sets the number of bytes to that of the existing documents; not if other servers write all the time."""
        import redis

        for _ in range(_ATTEMPTS):
            with self._redis.pipeline(transaction=True) as pipe, suppress(redis.WatchError):
                pipe.watch(_key("bytes"))
                stored = self._sizes([id.decode() for id in self._redis.zrange(_key("expiry"), 0, -1)])
                pipe.multi()
                pipe.set(_key("bytes"), sum(one.size_bytes for one in stored.values()))
                pipe.execute()
                break
        self._is_recount_due = False

    def _evict(self, now_s: float) -> None:
        while int(self._redis.get(_key("bytes")) or 0) > self._capacity.max_bytes:
            oldest = self._redis.zrange(_key("finished"), 0, 0)
            if not oldest:
                return
            self._remove(oldest, now_s)

    def _document(self, id: str, *, has_body: bool = True) -> Document | None:
        """has_body: False: without its body"""
        names = [name for name in _FIELDS if has_body or name != "body"]
        stored = dict(zip(names, self._redis.hmget(_key("doc", id), names), strict=True))
        if stored["kind"] is None:
            return None
        return Document(
            owner=stored["owner"].decode(),
            kind=stored["kind"].decode(),
            id=id,
            body=stored.get("body", b""),
            created_s=float(stored["created_s"]),
            expires_s=float(stored["expires_s"]),
            items=stored["items"],
            parent=stored["parent"].decode(),
            is_live=stored["is_live"] == b"1",
            continuation=stored["continuation"],
            labels=stored["labels"] or b"",
            output=stored["output"] or b"",
        )

    # --- leases -----------------------------------------------------------------------------------------------------

    def _has_ended(self, writer: str) -> bool:
        if writer == self._instance:
            return False
        machine, pid, _ = writer.split("|")
        if machine == _machine() and int(pid) != os.getpid() and not os.path.exists(f"/proc/{pid}"):
            return True
        return not self._redis.exists(_key("instance", writer))

    def _claim(self, id: str, writer: bytes) -> None:
        """Makes this server the writer of the document if it is the first to take it over."""
        lock = _key("adopted", f"{id}|{writer.decode()}")
        if not self._redis.set(lock, self._instance, nx=True, ex=LEASE_S):
            return
        self._claimed.add(id)  # before the transaction, whose answer may be lost
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(_key("live"), id, self._instance)
            pipe.hset(_key("doc", id), "writer", self._instance)  # makes a transaction of the former writer fail
            pipe.execute()

    def _keep_lease(self) -> None:
        while not self._closing.wait(_RENEW_INTERVAL_S):
            try:
                self._renew()
            except Exception:  # Redis is unreachable; retried later
                continue

    def _check_version(self) -> None:
        """Raises StoreError for data written by a release with another version."""
        self._redis.set(_key("version"), _VERSION, nx=True)
        if (found := int(self._redis.get(_key("version")) or 0)) != _VERSION:
            raise StoreError(
                f"the response store '{self._shown}' has version {found}, this server reads version {_VERSION}; "
                "use another database of that Redis"
            )

    def _renew(self) -> None:
        self._redis.set(_key("instance", self._instance), b"", ex=LEASE_S)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import redis

        try:
            try:
                self._redis.ping()  # opens a connection that Redis has closed
            except redis.ConnectionError:
                self._redis.ping()
            yield
        except redis.RedisError as error:
            raise StoreError(f"the response store '{self._shown}' failed: {error}") from None


def _is_live(held: Mapping[str, _Stored], id: str) -> bool:
    return id in held and held[id].is_live


def _unexpired(document: Document | None, now_s: float) -> Document | None:
    return None if document is None or document.expires_s <= now_s else document


def _key(*parts: str) -> str:
    return _PREFIX + ":".join(parts)


def _machine() -> str:
    """Identifies the machine and the namespace in which process ids are valid."""
    return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}".replace("|", "")


def _client(url: str) -> Redis:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise StoreError("the package 'redis' is not installed (pip install 'llmbackend[redis]')") from None
    retry = Retry(NoBackoff(), 0)  # a transaction must not be run twice
    try:
        return redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=retry)
    except ValueError as error:
        raise StoreError(f"the response store '{url.rpartition('@')[2]}': {error}") from None
