"""The contents of a response store: documents, and the logs of those in progress; group commit.

Invariants: the writes of one call are committed together or not at all; a storage is called by one thread at a time; at
most one transaction runs at a time, never on the event loop, and writes added in the meantime share the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.server_log import CAUSE, cause_of

from ..errors import log_bug

Kind = Literal["response", "conversation", "chat.completion"]
T = TypeVar("T")
log = logging.getLogger(__name__)


class StoreError(TritonError):
    """The store cannot be used or written. `str` gives the reason for operators; clients get no paths and addresses."""

    def __init__(self, reason: str) -> None:
        super().__init__("the response store is unavailable, see the server's log", ErrorCode.UNAVAILABLE)
        self._reason = reason

    def __str__(self) -> str:
        return self._reason


@dataclass(frozen=True, slots=True)
class Document:
    """One object of the API."""

    owner: str
    """The API key that owns it, in the form that `current_owner` returns; "" on servers without keys."""
    kind: Kind
    id: str
    """Unique across kinds and owners."""
    body: bytes
    """JSON."""
    created_s: float
    """Unix time, like `expires_s`."""
    expires_s: float
    items: bytes = b"[]"
    """JSON list: what the document was made from (input items, messages) or consists of."""
    parent: str = ""
    """The document that this one continues; "" for none."""
    is_live: bool = False
    """Whether it is still in progress. A live document is not evicted."""
    continuation: bytes = b""
    """What another process needs, besides the progress in the log, to continue a live document; b"": no process can."""
    labels: bytes = b""
    """JSON: what lists of its owner's documents can be filtered by; b"" for a document that is not in any list."""
    output: bytes = b""
    """JSON list: what follows `items` in the history of a document that continues this one. b"": only `body` has it."""

    @property
    def size_bytes(self) -> int:
        parts = (self.body, self.items, self.output, self.continuation, self.labels, self.id, self.owner)
        return sum(map(len, parts))

    @property
    def history_bytes(self) -> int:
        return len(self.items) + len(self.output or self.body)

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
    """Adds or replaces a document. The progress of a document that is not live is dropped."""

    document: Document
    ancestors: tuple[str, ...] = ()
    """Ids of the documents that it continues: they are kept as if they were put with it."""
    is_end: bool = False
    """Of a live document, which another server may have ended or deleted meanwhile: then it is left alone."""

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
    """The input from which the events were made, for a process that continues the document."""

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
    """Capacity of one store. When it is full, documents are removed, first those that were not put or continued for
    longest."""

    max_bytes: int
    max_documents_per_owner: int


class Storage(Protocol):
    """A storage backend. Every method may raise StoreError."""

    is_persistent: bool
    """Whether documents survive a restart of the server. If so, the methods block on a disk or a network."""

    takeover_interval_s: float | None
    """How often `live` is called again, if several servers share the store."""

    timeout_s: float | None
    """How long a request waits for the store before it is refused; None: no limit."""

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        """Applies all writes in one transaction, then removes what has expired by `now_s` or exceeds the capacity.
        Returns the ids of live documents that were not written because another server writes them now."""

    def get(self, id: str, now_s: float) -> Document | None:
        """None if it does not exist or has expired."""

    def get_history(self, id: str, now_s: float) -> Document | None:
        """Like `get`, without the body if the document has `output`."""

    def events(self, id: str, first: int, max_bytes: int) -> list[bytes]:
        """Committed events from number `first` on, of about max_bytes; at least one if there is one."""

    def num_events(self, id: str) -> int:
        """How many events are committed."""

    def progress(self, id: str) -> list[bytes]:
        """A live document's progress, by step."""

    def live(self) -> list[Document]:
        """Takes over the live documents that no running server writes."""

    def listed(self, owner: str, after: Entry | None, most: int, *, is_descending: bool) -> list[Entry]:
        """Up to `most` of an owner's documents with labels, in order of creation, from `after` on; some may have
        expired."""

    def next_expiry_s(self) -> float | None:
        """When the next document expires; None if there is none."""

    def close(self) -> None: ...


class Commits:
    """The only user of a Storage. Used only on the event loop."""

    def __init__(self, storage: Storage, clock_s: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._clock_s = clock_s
        self._threads = ThreadPoolExecutor(1, "response-store") if storage.is_persistent else None
        self._waiting: list[Write] = []
        self._waiting_done: asyncio.Future[None] | None = None
        self._committing: asyncio.Future[None] | None = None
        """The future of the writes that are being committed."""
        self._flushing: asyncio.Task[None] | None = None
        self.on_refused: Callable[[str], None] = lambda id: None
        """Called with the id of a document that another server now writes, before its commit is done."""

    def add(self, writes: Iterable[Write]) -> asyncio.Future[None]:
        """The future is done once they are committed, or fails with StoreError."""
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
        # Not for all writes to end, since more may always follow. The storage's only thread keeps the order.
        if (last := self._waiting_done or self._committing) is not None:
            await asyncio.wait((last,))
        try:
            return await self._run(partial(ask, self._storage, self._clock_s()))
        except StoreError as error:
            raise _logged(error) from None

    async def read_in_time(self, ask: Callable[[Storage, float], T]) -> T:
        """Like `read`, but also raises StoreError on timeout, when `ask` may still run: it must not change anything."""
        async with self._answered_in_time():
            return await self.read(ask)

    async def settled(self, done: asyncio.Future[None]) -> None:
        """Waits for a future of `add`. Raises StoreError, also on timeout; the writes may still be committed later."""
        async with self._answered_in_time():
            await asyncio.shield(done)

    @asynccontextmanager
    async def _answered_in_time(self) -> AsyncGenerator[None, None]:
        limit_s = self._storage.timeout_s
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
        """A task, so that it starts in the turn after the first write."""
        try:
            while self._waiting:
                writes, done = self._waiting, self._waiting_done
                self._waiting, self._waiting_done, self._committing = [], None, done
                error: StoreError | None = StoreError("the response store was closed")
                try:
                    error = await self._commit(writes)
                finally:
                    if done is not None and not done.done():
                        done.set_result(None) if error is None else done.set_exception(error)
        finally:
            self._flushing = self._committing = None

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
    """`error`, after logging it: the client's message refers to the log."""
    log.error("%s", error, extra={CAUSE: cause_of(error)})
    return error
