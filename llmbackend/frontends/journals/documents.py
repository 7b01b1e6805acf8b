"""What a response store keeps: documents and the logs of those being written; storage in memory; group commit.

Invariants: the writes of one call are committed together or not at all; a storage is called by one thread at a time; at
most one transaction runs, never on the event loop, and writes that are added meanwhile share the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from typing import Final, Literal, NamedTuple, Protocol, TypeVar

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.server_log import CAUSE, cause_of

from ..errors import log_bug

Kind = Literal["response", "conversation", "chat.completion"]
T = TypeVar("T")
_EVICTED_AT_ONCE: Final = 32
log = logging.getLogger(__name__)


class StoreError(TritonError):
    """A store that cannot be used or written. `str` tells operators why; clients get no paths and addresses."""

    def __init__(self, reason: str) -> None:
        super().__init__("the response store is unavailable, see the server's log", ErrorCode.UNAVAILABLE)
        self._reason = reason

    def __str__(self) -> str:
        return self._reason


@dataclass(frozen=True, slots=True)
class Document:
    """One object of the API."""

    owner: str
    """Its API key, as `current_owner` names it; "" where there are no keys."""
    kind: Kind
    id: str
    """No other document has it, whatever its kind and owner."""
    body: bytes
    """JSON."""
    created_s: float
    """Unix time, as `expires_s`."""
    expires_s: float
    items: bytes = b"[]"
    """JSON list: what the document was made from (input items, messages) or consists of."""
    parent: str = ""
    """The document that this one continues; "" for none."""
    is_live: bool = False
    """Whether it is still being written. A live document is not evicted."""
    continuation: bytes = b""
    """What another process needs to continue a live document, besides the progress in its log; b"": none can."""
    labels: bytes = b""
    """JSON: what a list of its owner's documents may be filtered by; b"" for a document that is in no list."""

    @property
    def size_bytes(self) -> int:
        parts = (self.body, self.items, self.continuation, self.labels, self.id, self.owner)
        return sum(map(len, parts))

    @property
    def entry(self) -> Entry:
        return Entry(self.created_s, self.id, self.labels)


class Entry(NamedTuple):
    """A document in a list, which is ordered by the first two fields."""

    created_s: float
    id: str
    labels: bytes = b""


@dataclass(frozen=True, slots=True)
class Put:
    """Adds or replaces a document. The progress of one that is not live is dropped."""

    document: Document

    @property
    def id(self) -> str:
        return self.document.id


@dataclass(frozen=True, slots=True)
class Append:
    """One step of a live document's log."""

    id: str
    first: int
    """The number of the first of `events`."""
    events: tuple[bytes, ...]
    progress: bytes
    """What led to the events, for a process that continues the document."""

    @property
    def size_bytes(self) -> int:
        return len(self.progress) + sum(map(len, self.events))


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes a document with its log, if it exists."""

    id: str


Write = Put | Append | Delete


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one store may hold; beyond it the oldest documents are removed."""

    max_bytes: int
    max_documents_per_owner: int


class Storage(Protocol):
    """One kind of store. Every method may raise StoreError."""

    is_persistent: bool
    """Whether documents survive a restart of the server. Then the methods block on a disk or a network."""

    takes_over_each_s: float | None
    """How often `live` is called again, where several servers share the store."""

    answers_within_s: float | None
    """How long a request waits for the store before it is refused; None: no limit."""

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        """All writes in one transaction; then removes what has expired by `now_s` or exceeds the capacity. Returns the
        ids of live documents that another server writes now, which were not written."""

    def get(self, id: str, now_s: float) -> Document | None:
        """None if it does not exist or has expired."""

    def events(self, id: str, first: int, max_bytes: int) -> list[bytes]:
        """Committed events from number `first` on, of about max_bytes; at least one if there is one."""

    def num_events(self, id: str) -> int:
        """How many are committed."""

    def progress(self, id: str) -> list[bytes]:
        """A live document's progress, by step."""

    def live(self) -> list[Document]:
        """Takes over the live documents that no running server writes."""

    def listed(self, owner: str, after: Entry | None, most: int, *, is_descending: bool) -> list[Entry]:
        """Up to `most` of an owner's documents that have labels, in order of creation, from behind `after` or from the
        first one; some may have expired."""

    def next_expiry_s(self) -> float | None:
        """When the next document expires; None if there is none."""

    def close(self) -> None: ...


class OwnStorage(ABC):
    """What storages of one process share: the effect of writes, expiry and eviction."""

    takes_over_each_s: float | None = None
    answers_within_s: float | None = None

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._count_of: Counter[str] = Counter()
        """Documents by owner."""
        self.held_bytes = 0

    def _commit(self, writes: Sequence[Write], now_s: float) -> None:
        for write in writes:
            match write:
                case Put(document):
                    self._put(document)
                case Append():
                    self._append(write)
                case Delete(id):
                    self._remove(id)
        for id in self._expired(now_s):
            self._remove(id)
        for owner in {write.document.owner for write in writes if isinstance(write, Put)}:
            for id in self._oldest(self._count_of[owner] - self._capacity.max_documents_per_owner, owner):
                self._remove(id)
        while self.held_bytes > self._capacity.max_bytes and (oldest := self._oldest(_EVICTED_AT_ONCE)):
            for id in oldest:
                if self.held_bytes > self._capacity.max_bytes:
                    self._remove(id)

    @abstractmethod
    def _put(self, document: Document) -> None: ...

    @abstractmethod
    def _append(self, step: Append) -> None: ...

    @abstractmethod
    def _remove(self, id: str) -> None: ...

    @abstractmethod
    def _expired(self, now_s: float) -> Sequence[str]: ...

    @abstractmethod
    def _oldest(self, most: int, owner: str | None = None) -> Sequence[str]:
        """At most `most` documents that are not live, of one owner or of all; none where `most` is not positive."""


def _place(entry: Entry) -> tuple[float, str]:
    return entry[:2]


class MemoryStorage(OwnStorage):
    """A Storage."""

    is_persistent = False

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._documents: OrderedDict[str, Document] = OrderedDict()
        """In order of expiry: all have the same time to live, from their creation or renewal."""
        self._finished: OrderedDict[str, None] = OrderedDict()
        """Ids of those that are not live, in the order of eviction."""
        self._finished_of: dict[str, OrderedDict[str, None]] = {}
        """The same by owner."""
        self._listed: dict[str, list[Entry]] = {}
        """By owner, sorted."""
        self._events: dict[str, list[bytes]] = {}
        self._log_bytes: Counter[str] = Counter()

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        self._commit(writes, now_s)
        return ()

    def get(self, id: str, now_s: float) -> Document | None:
        document = self._documents.get(id)
        return None if document is None or document.expires_s <= now_s else document

    def events(self, id: str, first: int, max_bytes: int) -> list[bytes]:
        found: list[bytes] = []
        for event in islice(self._events.get(id, []), first, None):
            found.append(event)
            max_bytes -= len(event)
            if max_bytes <= 0:
                break
        return found

    def num_events(self, id: str) -> int:
        return len(self._events.get(id, []))

    def progress(self, id: str) -> list[bytes]:
        return []

    def live(self) -> list[Document]:
        return []

    def listed(self, owner: str, after: Entry | None, most: int, *, is_descending: bool) -> list[Entry]:
        entries = self._listed.get(owner, [])
        if is_descending:
            end = len(entries) if after is None else bisect_left(entries, after[:2], key=_place)
            return entries[max(end - most, 0) : end][::-1]
        begin = 0 if after is None else bisect_right(entries, after[:2], key=_place)
        return entries[begin : begin + most]

    def next_expiry_s(self) -> float | None:
        return next((document.expires_s for document in self._documents.values()), None)

    def close(self) -> None:
        for id in list(self._documents):
            self._remove(id)

    def _put(self, document: Document) -> None:
        document = replace(document, continuation=b"")  # useless after this process ends
        before = self._documents.get(document.id)
        self.held_bytes += document.size_bytes - (0 if before is None else before.size_bytes)
        self._documents[document.id] = document
        self._count_of[document.owner] += before is None
        if before is not None and document.expires_s > before.expires_s:
            self._documents.move_to_end(document.id)
        if before is not None:
            self._unlist(before)
        if document.labels:
            insort(self._listed.setdefault(document.owner, []), document.entry)
        if not document.is_live:
            self._finished[document.id] = None
            self._finished_of.setdefault(document.owner, OrderedDict())[document.id] = None

    def _append(self, step: Append) -> None:
        if step.id not in self._documents:
            return
        self._events.setdefault(step.id, []).extend(step.events)
        size_bytes = sum(map(len, step.events))
        self._log_bytes[step.id] += size_bytes
        self.held_bytes += size_bytes

    def _remove(self, id: str) -> None:
        document = self._documents.pop(id, None)
        if document is None:
            return
        self._events.pop(id, None)
        self._unlist(document)
        self.held_bytes -= document.size_bytes + self._log_bytes.pop(id, 0)
        self._finished.pop(id, None)
        owner = document.owner
        self._count_of[owner] -= 1
        if (of_owner := self._finished_of.get(owner)) is not None:
            of_owner.pop(id, None)
        if not self._count_of[owner]:
            del self._count_of[owner]
            self._finished_of.pop(owner, None)

    def _unlist(self, document: Document) -> None:
        if document.labels:
            entries = self._listed[document.owner]
            del entries[bisect_left(entries, document.entry[:2], key=_place)]
            if not entries:
                del self._listed[document.owner]

    def _expired(self, now_s: float) -> Sequence[str]:
        return [one.id for one in takewhile(lambda one: one.expires_s <= now_s, self._documents.values())]

    def _oldest(self, most: int, owner: str | None = None) -> Sequence[str]:
        return list(islice(self._finished if owner is None else self._finished_of.get(owner, ()), max(most, 0)))


class Commits:
    """The only user of a Storage. Used only on the event loop."""

    def __init__(self, storage: Storage, clock_s: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._clock_s = clock_s
        self._threads = ThreadPoolExecutor(1, "response-store") if storage.is_persistent else None
        self._waiting: list[Write] = []
        self._waiting_done: asyncio.Future[None] | None = None
        self._flushing: asyncio.Task[None] | None = None
        self.num_transactions = 0
        self.on_refused: Callable[[str], None] = lambda id: None
        """Called with the id of a document that another server writes now, before its commit is done."""

    def add(self, writes: Iterable[Write]) -> asyncio.Future[None]:
        """Done when they are committed, or with StoreError."""
        loop = asyncio.get_running_loop()
        self._waiting += writes
        if self._waiting_done is None:
            self._waiting_done = loop.create_future()
            # Marks an error as retrieved: callers need not wait.
            self._waiting_done.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._flushing is None:
            self._flushing = loop.create_task(self._flush())
        return self._waiting_done

    async def read(self, ask: Callable[[Storage, float], T]) -> T:
        """`ask(storage, now_s)`, after all writes that were added before. Raises StoreError."""
        if self._waiting_done is not None and not self._waiting:
            await asyncio.wait((self._waiting_done,))
        while self._flushing is not None:
            await asyncio.wait((self._flushing,))
        try:
            return await self._run(partial(ask, self._storage, self._clock_s()))
        except StoreError as error:
            raise _logged(error) from None

    async def read_in_time(self, ask: Callable[[Storage, float], T]) -> T:
        """As `read`; also raises StoreError when it takes too long. `ask` may then still run, so it must not change
        anything."""
        async with self._answered_in_time():
            return await self.read(ask)

    async def settled(self, done: asyncio.Future[None]) -> None:
        """Waits for a future of `add`. Raises StoreError, also when it takes too long; the writes may then still be
        committed."""
        async with self._answered_in_time():
            await asyncio.shield(done)

    @asynccontextmanager
    async def _answered_in_time(self) -> AsyncGenerator[None, None]:
        limit_s = self._storage.answers_within_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise _logged(StoreError(f"the response store did not answer within {limit_s:g} s")) from None

    async def close(self) -> None:
        while self._flushing is not None:
            await asyncio.wait((self._flushing,))
        await self._run(self._storage.close)
        if self._threads is not None:
            self._threads.shutdown()

    async def _flush(self) -> None:
        """A task, so that it begins in the turn after the first write."""
        try:
            while self._waiting:
                writes, done = self._waiting, self._waiting_done
                self._waiting, self._waiting_done = [], None
                self.num_transactions += 1
                error: StoreError | None = StoreError("the response store was closed")
                try:
                    error = await self._commit(writes)
                finally:
                    if done is not None and not done.done():
                        done.set_result(None) if error is None else done.set_exception(error)
        finally:
            self._flushing = None

    async def _commit(self, writes: Sequence[Write]) -> StoreError | None:
        """Returns the error, if any."""
        try:
            for id in await self._run(partial(self._storage.commit, writes, self._clock_s())):
                self.on_refused(id)
        except StoreError as failure:
            return _logged(failure)
        except Exception as failure:
            log_bug("unexpected error in the response store", failure)
            return StoreError(f"the response store failed: {failure!r}")
        return None

    async def _run(self, work: Callable[[], T]) -> T:
        if self._threads is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _logged(error: StoreError) -> StoreError:
    """`error`, logged: the client's message refers to the log."""
    log.error("%s", error, extra={CAUSE: cause_of(error)})
    return error
