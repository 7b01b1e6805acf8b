"""ResponseStore: a server's stored documents, and the journals of those in progress.

Invariants: only its owner gets a document; readers get an event after it was committed; nothing here blocks the event
loop on a disk or a network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from llmbackend.core.errors import TritonError
from llmbackend.frontends.access.request_identity import REQUEST_IDENTITY
from llmbackend.frontends.errors import log_bug

from .documents import Append, Commits, Delete, Document, Entry, Kind, Put, Storage, StoreError
from .journal import Journal

MAX_LINEAGE = 4096
"""Maximum length of the chain of documents that a document continues."""
HELD_EVENT_BYTES = 4 << 20
"""How much of a live document's events is held in memory; slower readers read them from the store."""
_WATCH_INTERVAL_S = 0.25
"""Time between two reads of events that another server writes."""
_EXPIRY_RETRY_S = 10.0
"""Time until the next attempt to remove expired documents after a failure of the store."""
_END_RETRY_S = 1.0
"""Time until the next attempt to store final documents after a failure of the store."""
_LOAD_BYTES = 1 << 20
"""Bytes of events that are read at once."""
_MAX_UNCOMMITTED_BYTES = 1 << 20
"""Uncommitted bytes of one log at which its producer has to wait."""
_LIST_BATCH = 256
"""Entries of a list that are inspected in one turn of the event loop."""
_MAX_PAGE_BYTES = 8 << 20
"""Limit of the documents of one page, unless the page is a single document."""


class NotStoredError(Exception):
    """The owner has no such document."""

    def __init__(self, kind: Kind, id: str) -> None:
        super().__init__(f"no {kind} with the id '{id}' is stored")
        self.kind = kind
        self.id = id


class LineageTooLongError(Exception):
    """The chain that a document continues is too long; the text contains the limit."""


def current_owner() -> str:
    """The owner of the current request's documents: its API key's owner (ApiKey.owner), "" without keys."""
    identity = REQUEST_IDENTITY.get()
    return "" if identity is None else identity.account.owner


class Producer(Protocol):
    """Writes live documents."""

    async def take_over(self, document: Document) -> None:
        """Continues a live document of a server that has ended, or stores it as ended."""

    async def suspend(self) -> None:
        """Stops, leaving its live documents as they are."""


class ResponseStore:
    """Used on one event loop."""

    def __init__(
        self,
        storage: Storage,
        ttl_s: float,
        clock_s: Callable[[], float] = time.time,
        *,
        max_log_bytes: int = 64 << 20,
    ) -> None:
        """max_log_bytes: limit of the events and progress of one live document"""
        self._ttl_s = ttl_s
        self._max_log_bytes = max_log_bytes
        self.clock_s = clock_s
        self.is_persistent = storage.is_persistent
        self._commits = Commits(storage, clock_s)
        self._commits.on_refused = self._lost
        self._live: dict[str, LiveLog] = {}
        self.producer: Producer | None = None
        """Set before `start`."""
        self._expiry: asyncio.TimerHandle | None = None
        """Timer for the document that expires first."""
        self._expiring: asyncio.Task[None] | None = None
        self._takeover_interval_s = storage.takeover_interval_s
        self._taking_over: asyncio.Task[None] | None = None
        self._claimed: list[Document] = []
        """Live documents that are this server's now, and that the producer has yet to take over."""
        self._unstored: dict[str, Document] = {}
        """Final documents whose commit failed, by id."""
        self._storing: asyncio.Task[None] | None = None
        """Stores them, once there are some."""
        self._watching: set[asyncio.Task[None]] = set()
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """The producer takes over the live documents of servers that have ended. Raises StoreError if the store is this
        server's alone; otherwise it is tried again."""
        interval_s = self._takeover_interval_s
        try:
            await self._take_over()
        except StoreError:  # logged by Commits
            if interval_s is None:
                raise
        await self._expire_or_try_again()
        if interval_s is not None:
            self._taking_over = asyncio.get_running_loop().create_task(self._keep_taking_over(interval_s))

    async def _take_over(self) -> None:
        if (producer := self.producer) is None:
            return
        self._claimed += await self._commits.read(lambda storage, now_s: storage.live())
        while self._claimed:
            document = self._claimed.pop()
            try:
                await producer.take_over(document)
            except StoreError:  # the storage names a claimed document only once
                self._claimed.append(document)
                raise

    async def _keep_taking_over(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._take_over()
            except StoreError:  # logged by Commits
                continue
            except Exception as error:
                log_bug("unexpected error while taking over responses", error)

    async def suspend(self) -> None:
        """To be called before the server ends: live documents of a persistent store are left to the next server."""
        if self.producer is not None and self.is_persistent:
            await self.producer.suspend()

    async def close(self) -> None:
        """To be called after the last request. Ends the journals that are still in progress."""
        if self._expiry is not None:
            self._expiry.cancel()
        for task in (self._expiring, self._taking_over, self._storing, *self._watching):
            if task is not None:
                task.cancel()
        for log in list(self._live.values()):
            log.abandon()
        await self._commits.close()

    # --- documents --------------------------------------------------------------------------------------------------

    def expires_s(self, created_s: float) -> float:
        return created_s + self._ttl_s

    async def put(self, document: Document, ancestors: tuple[str, ...] = ()) -> None:
        """Adds or replaces the document and waits for the commit. ancestors: see Put. Raises StoreError."""
        await self.put_all([Put(document, ancestors)])

    async def put_all(self, puts: Sequence[Put]) -> None:
        """Like `put`, in one transaction."""
        await self._commits.settled(self._add(puts))

    async def get(self, owner: str, kind: Kind, id: str) -> Document:
        """Raises NotStoredError, StoreError."""
        return _of(owner, kind, id, await self._commits.read_in_time(lambda storage, now_s: storage.get(id, now_s)))

    async def get_history(self, owner: str, kind: Kind, id: str) -> Document:
        """Like `get`, without the body if the document has `output`."""
        return await self._commits.read_in_time(partial(_history, owner, kind, id))

    async def delete(self, owner: str, kind: Kind, id: str) -> None:
        """Removes the document with its log and ends its journal. Raises NotStoredError, StoreError."""
        await self.get(owner, kind, id)
        if (log := self._live.get(id)) is not None:
            log.abandon()
        self._unstored.pop(id, None)
        await self._commits.settled(self._commits.add([Delete(id)]))

    async def lineage(self, owner: str, kind: Kind, id: str, max_bytes: int) -> list[Document]:
        """The document and its ancestors, oldest first, each like that of `get_history`. max_bytes: of all histories.
        Raises NotStoredError, LineageTooLongError, StoreError."""
        return await self._commits.read_in_time(partial(_lineage, owner, kind, id, max_bytes))

    async def page(
        self,
        owner: str,
        kind: Kind,
        after: str | None,
        limit: int,
        *,
        is_descending: bool,
        matches: Callable[[bytes], bool],
    ) -> tuple[list[Document], bool]:
        """Matching documents with labels, in order of creation, starting after the document `after`; and whether more
        follow. Returns fewer than `limit` beyond _MAX_PAGE_BYTES. Raises NotStoredError for `after`, StoreError."""
        place = None if after is None else (await self.get(owner, kind, after)).entry
        found: list[Document] = []
        size_bytes = 0
        while entries := await self._commits.read_in_time(partial(_entries, owner, place, is_descending=is_descending)):
            for place in entries:
                if not place.labels or not matches(place.labels):
                    continue
                with suppress(NotStoredError):
                    document = await self.get(owner, kind, place.id)
                    size_bytes += document.size_bytes
                    if len(found) == limit or (found and size_bytes > _MAX_PAGE_BYTES):
                        return found, True
                    found.append(document)
            await asyncio.sleep(0)
        return found, False

    def lock(self, id: str) -> asyncio.Lock:
        """To be held while a document is read, changed and put back."""
        return self._changing.setdefault(id, asyncio.Lock())

    # --- logs -------------------------------------------------------------------------------------------------------

    def begin(self, document: Document, ancestors: tuple[str, ...] = ()) -> LiveLog:
        """Adds a live document; the returned log takes its events. ancestors: see Put"""
        return self._opened(document, self._journal(document.id, 0), ancestors)

    async def resume(self, document: Document) -> tuple[LiveLog, list[bytes]]:
        """The log of a live document that another process began, and its progress by step."""
        progress = await self._commits.read(lambda storage, now_s: storage.progress(document.id))
        return self._opened(document, await self._stored_journal(document)), progress

    async def journal(self, document: Document) -> Journal:
        """The events of a document returned by `get`. Raises StoreError."""
        if (log := self._live.get(document.id)) is not None:
            return log.journal
        journal = await self._stored_journal(document)
        if document.is_live:
            self._begin_watching(document.id, journal)
        else:
            journal.end()
        return journal

    def _opened(self, document: Document, journal: Journal, ancestors: tuple[str, ...] = ()) -> LiveLog:
        forget = partial(self._live.pop, document.id, None)
        added = self._add([Put(document, ancestors)])
        log = LiveLog(document, journal, self._commits, self._max_log_bytes, added, forget, self._store_later)
        self._live[document.id] = log
        return log

    def _store_later(self, document: Document) -> None:
        self._unstored[document.id] = document
        if self._storing is None or self._storing.done():
            self._storing = asyncio.get_running_loop().create_task(self._store_unstored())

    async def _store_unstored(self) -> None:
        """Without it, a response would stay in progress after a short failure of the store."""
        while self._unstored:
            await asyncio.sleep(_END_RETRY_S)
            documents = tuple(self._unstored.values())
            unexpired = [one for one in documents if one.expires_s > self.clock_s()]
            with suppress(StoreError):  # logged by Commits
                await asyncio.shield(self._commits.add([Put(one, is_end=True) for one in unexpired]))
                for one in documents:
                    self._unstored.pop(one.id, None)

    def _lost(self, id: str) -> None:
        """Another server has taken the document over after this one's lease expired; readers here get its events."""
        if (log := self._live.pop(id, None)) is not None:
            log.lost()
            self._begin_watching(id, log.journal)

    def _begin_watching(self, id: str, journal: Journal) -> None:
        watching = asyncio.get_running_loop().create_task(self._watch(id, journal))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    async def _watch(self, id: str, journal: Journal) -> None:
        """Reads the events of another server while the journal has readers here."""
        try:
            while True:
                await asyncio.sleep(_WATCH_INTERVAL_S)
                document = await self._commits.read(lambda storage, now_s: storage.get(id, now_s))
                while events := await self._load(id, journal.next_number):
                    journal.publish(events)
                if document is None or not document.is_live or not journal.num_readers:
                    return
        except StoreError as error:
            journal.end(error)
        finally:
            journal.end()

    async def _stored_journal(self, document: Document) -> Journal:
        count = await self._commits.read(lambda storage, now_s: storage.num_events(document.id))
        return self._journal(document.id, count)

    def _journal(self, id: str, next_number: int) -> Journal:
        return Journal(HELD_EVENT_BYTES, next_number, partial(self._load, id))

    async def _load(self, id: str, first: int) -> Sequence[bytes]:
        return await self._commits.read_in_time(lambda storage, now_s: storage.events(id, first, _LOAD_BYTES))

    # --- expiry -----------------------------------------------------------------------------------------------------

    def _add(self, puts: Sequence[Put]) -> asyncio.Future[None]:
        self._expire_at(min(one.document.expires_s for one in puts))
        return self._commits.add(puts)

    def _expire_at(self, expires_s: float) -> None:
        if self._expiry is None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(max(expires_s - self.clock_s(), 1.0), self._begin_expiry)

    def _begin_expiry(self) -> None:
        self._expiry = None
        self._expiring = asyncio.get_running_loop().create_task(self._expire_or_try_again())

    async def _expire_or_try_again(self) -> None:
        try:
            await self._expire()
        except StoreError:  # logged by Commits
            self._expire_at(self.clock_s() + _EXPIRY_RETRY_S)

    async def _expire(self) -> None:
        next_s = await self._commits.read(_expired)
        if next_s is not None:
            self._expire_at(next_s)


class LiveLog:
    """A live document, its log and its journal. Owned by the producer of the events."""

    def __init__(
        self,
        document: Document,
        journal: Journal,
        commits: Commits,
        max_bytes: int,
        opened: asyncio.Future[None],
        forget: Callable[[], object],
        store_later: Callable[[Document], None],
    ) -> None:
        """opened: the commit of the document. forget: called when no event will follow. store_later: called with the
        final document if its commit fails"""
        self.document = document
        self.journal = journal
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Called once, when a step was not committed or the log is too long."""
        self._commits = commits
        self._max_bytes = max_bytes
        self._forget = forget
        self._store_later = store_later
        self._next = journal.next_number
        self._size_bytes = 0
        self._uncommitted_bytes = 0
        self._last = opened
        self._is_over = False
        self._is_lost = False
        self._has_failed = False
        """Whether a step was not committed: later ones would leave a gap."""
        opened.add_done_callback(partial(self._committed, ()))

    @property
    def id(self) -> str:
        return self.document.id

    def append(self, events: Sequence[bytes], progress: bytes) -> None:
        """Adds one step."""
        if self._is_over or self._has_failed:
            return
        step = self._step(events, progress)
        self._last = self._commits.add([step])
        self._last.add_done_callback(partial(self._committed, step.events))

    async def committed(self) -> None:
        """Waits until all steps are committed. Raises StoreError."""
        await self._commits.settled(self._last)

    async def wait_for_capacity(self) -> None:
        """Waits while too much is uncommitted. Raises StoreError."""
        if self._uncommitted_bytes > _MAX_UNCOMMITTED_BYTES:
            await asyncio.shield(self._last)

    async def finish(self, document: Document, events: Sequence[bytes] = ()) -> None:
        """Adds the last events, and stores the final document. Raises StoreError."""
        if self._is_over:
            return
        self._is_over = True
        self.document = replace(document, is_live=False, continuation=b"")
        step, end = self._step(() if self._has_failed else events, b""), Put(self.document, is_end=True)
        done = self._commits.add([step, end])
        done.add_done_callback(partial(self._committed, step.events))
        done.add_done_callback(lambda _: None if self._is_lost else self._end())
        await self._commits.settled(done)

    def lost(self) -> None:
        """Called when another server writes the document."""
        self._is_over = self._is_lost = True
        self.on_failure(TritonError(f"another server continues '{self.id}'"))

    def abandon(self) -> None:
        """Ends it without a last event; the store retains what it has."""
        self._is_over = True
        self._end()

    def _step(self, events: Sequence[bytes], progress: bytes) -> Append:
        step = Append(self.id, self._next, tuple(events), progress)
        self._next += len(events)
        self._size_bytes += step.size_bytes
        self._uncommitted_bytes += step.size_bytes
        if self._size_bytes > self._max_bytes and not self._is_over:
            error = TritonError(f"the response has more than {self._max_bytes} bytes of events")
            asyncio.get_running_loop().call_soon(self.on_failure, error)
        return step

    def _committed(self, events: tuple[bytes, ...], done: asyncio.Future[None]) -> None:
        self._uncommitted_bytes = 0 if done is self._last else self._uncommitted_bytes
        if self._is_lost:
            return
        error = None if done.cancelled() else done.exception()
        if error is None:
            self.journal.publish(events)
            return
        self._has_failed = True
        if self._is_over and not self.document.is_live:
            self._store_later(self.document)
        if not self.journal.has_ended and isinstance(error, Exception):
            self.journal.end(error)
            self.on_failure(error)

    def _end(self) -> None:
        self._forget()
        self.journal.end()


def _expired(storage: Storage, now_s: float) -> float | None:
    storage.commit((), now_s)
    return storage.next_expiry_s()


def _entries(owner: str, after: Entry | None, storage: Storage, now_s: float, *, is_descending: bool) -> list[Entry]:
    return storage.listed(owner, after, _LIST_BATCH, is_descending=is_descending)


def _of(owner: str, kind: Kind, id: str, document: Document | None) -> Document:
    if document is None or document.owner != owner or document.kind != kind:
        raise NotStoredError(kind, id)
    return document


def _history(owner: str, kind: Kind, id: str, storage: Storage, now_s: float) -> Document:
    return _of(owner, kind, id, storage.get_history(id, now_s))


def _lineage(owner: str, kind: Kind, id: str, max_bytes: int, storage: Storage, now_s: float) -> list[Document]:
    found: list[Document] = []
    size_bytes = 0
    while id:
        document = _history(owner, kind, id, storage, now_s)
        size_bytes += document.history_bytes
        if size_bytes > max_bytes or len(found) >= MAX_LINEAGE:
            raise LineageTooLongError(f"at most {max_bytes} bytes in {MAX_LINEAGE} responses")
        found.append(document)
        id = document.parent
    return found[::-1]
