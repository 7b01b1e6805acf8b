"""ResponseStore: the stored responses of a server, and the journals of those that are being written.

For: the endpoints of the Responses API. Does not know: what a response says, how it is made. Invariants: a document is
given to its owner alone; a reader is shown an event only after it was committed; nothing here waits for a disk or a
network on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from llmbackend.core.errors import TritonError
from llmbackend.frontends.access.request_identity import REQUEST_IDENTITY
from llmbackend.frontends.errors import log_bug

from .documents import Append, Commits, Delete, Document, Entry, Kind, Put, Storage, StoreError
from .journal import Journal

MAX_LINEAGE = 4096
"""Documents that one continues after, at most."""
HELD_EVENT_BYTES = 4 << 20
"""Events of a live document that are in memory; readers that are further behind read them from the store."""
_WATCH_INTERVAL_S = 0.25
"""Between two looks for events that another server writes."""
_EXPIRY_PAUSE_S = 10.0
"""Before expired documents are looked for again, after the store has failed."""
_LOADED_BYTES = 1 << 20
"""Of events that are read at once."""
_MAX_UNCOMMITTED_BYTES = 1 << 20
"""Of one log: a producer that is further ahead waits."""
_LISTED_AT_ONCE = 256
"""Entries of a list that are looked at in one turn of the event loop."""
_MAX_PAGE_BYTES = 8 << 20
"""Of the documents of one page, unless it is one."""


class NotStoredError(Exception):
    """There is no such document for this owner; the argument is its id."""


class LineageTooLongError(Exception):
    """What a document continues after is more than may be read; the text says how much may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How long documents are kept, beside what their storage has room for."""

    ttl_s: float
    max_log_bytes: int = 64 << 20
    """Events and progress of one live document."""


def current_owner() -> str:
    """Whose documents the current request may see: its API key's (see ApiKey.owner), "" where there are no keys."""
    identity = REQUEST_IDENTITY.get()
    return "" if identity is None else identity.account.owner


class Producer(Protocol):
    """What makes live documents."""

    async def take_over(self, document: Document) -> None:
        """A live document of a server that has ended: continues with it, or puts it as one that has ended."""

    async def suspend(self) -> None:
        """Leaves its live documents as they are."""


class ResponseStore:
    """Used on one event loop."""

    def __init__(self, storage: Storage, options: StoreOptions, clock_s: Callable[[], float] = time.time) -> None:
        self.options = options
        self.clock_s = clock_s
        self.is_persistent = storage.is_persistent
        self._commits = Commits(storage, clock_s)
        self._commits.on_refused = self._lost
        self._live: dict[str, LiveLog] = {}
        self.producer: Producer | None = None
        """Set before `start`."""
        self._expiry: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None
        self._takes_over_each_s = storage.takes_over_each_s
        self._taking_over: asyncio.Task[None] | None = None
        self._watching: set[asyncio.Task[None]] = set()
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def num_transactions(self) -> int:
        return self._commits.num_transactions

    async def start(self) -> None:
        """Hands the live documents of a server that has ended to the producer. Raises StoreError."""
        await self._take_over()
        await self._expire()
        if self._takes_over_each_s is not None:
            self._taking_over = asyncio.get_running_loop().create_task(self._keep_taking_over(self._takes_over_each_s))

    async def _take_over(self) -> None:
        if (producer := self.producer) is not None:
            for document in await self._commits.read(lambda storage, now_s: storage.live()):
                await producer.take_over(document)

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
        """Before the server ends: leaves what is live in a store that stays to the next server."""
        if self.producer is not None and self.is_persistent:
            await self.producer.suspend()

    async def close(self) -> None:
        """After the last request. Journals that are still written end where they are."""
        if self._expiry is not None:
            self._expiry.cancel()
        for task in (self._expiring, self._taking_over, *self._watching):
            if task is not None:
                task.cancel()
        for log in list(self._live.values()):
            log.abandon()
        await self._commits.close()

    # --- documents --------------------------------------------------------------------------------------------------

    def expires_s(self, created_s: float) -> float:
        return created_s + self.options.ttl_s

    async def put(self, document: Document) -> None:
        """Adds or replaces it; returns when it is committed. Raises StoreError."""
        await self.settled(self._add(document))

    async def get(self, owner: str, kind: Kind, id: str) -> Document:
        """Raises NotStoredError, StoreError."""
        return _of(owner, kind, id, await self._commits.read_in_time(lambda storage, now_s: storage.get(id, now_s)))

    async def delete(self, owner: str, kind: Kind, id: str) -> None:
        """Removes it with its log; a live one's journal ends. Raises NotStoredError, StoreError."""
        await self.get(owner, kind, id)
        if (log := self._live.get(id)) is not None:
            log.abandon()
        await self.settled(self._commits.add([Delete(id)]))

    async def lineage(self, owner: str, kind: Kind, id: str, max_bytes: int) -> list[Document]:
        """The document and those that it continues after, the oldest first. Raises NotStoredError,
        LineageTooLongError, StoreError."""
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
        """Documents with labels that match, in order of creation, from behind the document `after`; and whether others
        follow. Fewer than `limit` where they would have more than _MAX_PAGE_BYTES. Raises NotStoredError for `after`,
        StoreError."""
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

    def changing(self, id: str) -> asyncio.Lock:
        """Held by who reads a document, changes it and puts it back."""
        return self._changing.setdefault(id, asyncio.Lock())

    # --- logs -------------------------------------------------------------------------------------------------------

    def begin(self, document: Document) -> LiveLog:
        """A new live document, and the log that its events go into."""
        return self._opened(document, LiveLog(self, document, self._journal(document.id, 0)))

    async def resume(self, document: Document) -> tuple[LiveLog, list[bytes]]:
        """The log of a live document that another process began, and its progress by step."""
        progress = await self._commits.read(lambda storage, now_s: storage.progress(document.id))
        journal = await self._stored_journal(document)
        return self._opened(document, LiveLog(self, document, journal)), progress

    def live_log(self, id: str) -> LiveLog | None:
        return self._live.get(id)

    async def journal(self, document: Document) -> Journal:
        """The events of a document that `get` gave. Raises StoreError."""
        if (log := self._live.get(document.id)) is not None:
            return log.journal
        journal = await self._stored_journal(document)
        if document.is_live:
            self._begin_watching(document.id, journal)
        else:
            journal.end()
        return journal

    def append(self, log: LiveLog, step: Append) -> asyncio.Future[None]:
        """For LiveLog."""
        return self._commits.add([step])

    def finish(self, log: LiveLog, step: Append, document: Document) -> asyncio.Future[None]:
        """For LiveLog."""
        return self._commits.add([step, Put(document)])

    async def settled(self, commit: asyncio.Future[None]) -> None:
        """Waits for the commit. Raises StoreError, also when the store does not answer in time; it may commit later."""
        await self._commits.settled(commit)

    def forget(self, log: LiveLog) -> None:
        """For LiveLog."""
        self._live.pop(log.id, None)

    def _opened(self, document: Document, log: LiveLog) -> LiveLog:
        self._live[document.id] = log
        log.opened(self._add(document))
        return log

    def _lost(self, id: str) -> None:
        """Another server has taken the document over, because this one gave no sign of life; its readers here continue
        with what that one writes."""
        if (log := self._live.pop(id, None)) is not None:
            log.lost()
            self._begin_watching(id, log.journal)

    def _begin_watching(self, id: str, journal: Journal) -> None:
        watching = asyncio.get_running_loop().create_task(self._watch(id, journal))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    async def _watch(self, id: str, journal: Journal) -> None:
        """Another server writes it: looks for its events while somebody reads them here."""
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
        return await self._commits.read_in_time(lambda storage, now_s: storage.events(id, first, _LOADED_BYTES))

    # --- expiry -----------------------------------------------------------------------------------------------------

    def _add(self, document: Document) -> asyncio.Future[None]:
        self._expire_at(document.expires_s)
        return self._commits.add([Put(document)])

    def _expire_at(self, expires_s: float) -> None:
        """One timer, for the document that expires first."""
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
            self._expire_at(self.clock_s() + _EXPIRY_PAUSE_S)

    async def _expire(self) -> None:
        next_s = await self._commits.read(_expired)
        if next_s is not None:
            self._expire_at(next_s)


class LiveLog:
    """A live document, its log and its journal. Owner: what produces the events."""

    def __init__(self, store: ResponseStore, document: Document, journal: Journal) -> None:
        self.journal = journal
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Called once when the store did not take a step, or holds as much of this log as it may."""
        self._store = store
        self._document = document
        self._next = journal.next_number
        self._size_bytes = 0
        self._uncommitted_bytes = 0
        self._last: asyncio.Future[None] | None = None
        self._is_over = False
        self._is_lost = False

    @property
    def id(self) -> str:
        return self._document.id

    @property
    def document(self) -> Document:
        return self._document

    def opened(self, committed: asyncio.Future[None]) -> None:
        """For ResponseStore."""
        self._last = committed
        committed.add_done_callback(partial(self._committed, ()))

    def append(self, events: Sequence[bytes], progress: bytes) -> None:
        """One step. Readers get the events once they are committed."""
        if self._is_over:
            return
        step = self._step(events, progress)
        self._last = self._store.append(self, step)
        self._last.add_done_callback(partial(self._committed, step.events))

    async def committed(self) -> None:
        """Waits until all that was appended is committed. Raises StoreError."""
        if self._last is not None:
            await self._store.settled(self._last)

    async def room(self) -> None:
        """Waits while too much is uncommitted, however long the store takes. Raises StoreError."""
        if self._uncommitted_bytes > _MAX_UNCOMMITTED_BYTES and self._last is not None:
            await asyncio.shield(self._last)

    async def finish(self, document: Document, events: Sequence[bytes] = ()) -> None:
        """The last events, and the document as it stays. Raises StoreError."""
        if self._is_over:
            return
        self._is_over = True
        self._document = replace(document, is_live=False, continuation=b"")
        step = self._step(events, b"")
        done = self._store.finish(self, step, self._document)
        done.add_done_callback(partial(self._committed, step.events))
        done.add_done_callback(lambda _: None if self._is_lost else self._end())
        await self._store.settled(done)

    def lost(self) -> None:
        """For ResponseStore: another server writes the document now."""
        self._is_over = self._is_lost = True
        self.on_failure(TritonError(f"another server continues '{self.id}'"))

    def abandon(self) -> None:
        """No further event comes; what is stored stays as it is."""
        self._is_over = True
        self._end()

    def _step(self, events: Sequence[bytes], progress: bytes) -> Append:
        step = Append(self.id, self._next, tuple(events), progress)
        self._next += len(events)
        self._size_bytes += step.size_bytes
        self._uncommitted_bytes += step.size_bytes
        if self._size_bytes > self._store.options.max_log_bytes and not self._is_over:
            error = TritonError(f"the response has more than {self._store.options.max_log_bytes} bytes of events")
            asyncio.get_running_loop().call_soon(self.on_failure, error)
        return step

    def _committed(self, events: tuple[bytes, ...], done: asyncio.Future[None]) -> None:
        self._uncommitted_bytes = 0 if done is self._last else self._uncommitted_bytes
        if self._is_lost:
            return
        error = None if done.cancelled() else done.exception()
        if error is None:
            self.journal.publish(events)
        elif not self.journal.has_ended and isinstance(error, Exception):
            self.journal.end(error)
            self.on_failure(error)

    def _end(self) -> None:
        self._store.forget(self)
        self.journal.end()


def _expired(storage: Storage, now_s: float) -> float | None:
    storage.commit((), now_s)
    return storage.next_expiry_s()


def _entries(owner: str, after: Entry | None, storage: Storage, now_s: float, *, is_descending: bool) -> list[Entry]:
    return storage.listed(owner, after, _LISTED_AT_ONCE, is_descending=is_descending)


def _of(owner: str, kind: Kind, id: str, document: Document | None) -> Document:
    if document is None or document.owner != owner or document.kind != kind:
        raise NotStoredError(id)
    return document


def _lineage(owner: str, kind: Kind, id: str, max_bytes: int, storage: Storage, now_s: float) -> list[Document]:
    found: list[Document] = []
    size_bytes = 0
    while id:
        document = _of(owner, kind, id, storage.get(id, now_s))
        size_bytes += document.size_bytes
        if size_bytes > max_bytes or len(found) >= MAX_LINEAGE:
            raise LineageTooLongError(f"at most {max_bytes} bytes in {MAX_LINEAGE} responses")
        found.append(document)
        id = document.parent
    return found[::-1]
