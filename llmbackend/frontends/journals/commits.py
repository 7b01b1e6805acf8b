"""Group commit: all writes of one turn of the event loop go to the store in one transaction.

For: ResponseStore. Does not know: what is written. Invariants: writes are committed in the order in which they were
added; at most one transaction is under way, and what is added meanwhile waits for the next one, all together; a store
that waits for a disk or a network does so on the one thread here, never on the event loop. One engine step wakes all
its streams in one turn, so that their writes are one transaction.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from llmbackend.core.server_log import CAUSE, cause_of
from llmbackend.frontends.errors import log_bug

from .documents import Storage, StoreError, Write

T = TypeVar("T")
log = logging.getLogger(__name__)


class Commits:
    """The only user of a Storage. Used on the event loop alone."""

    def __init__(self, storage: Storage, clock_s: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._clock_s = clock_s
        self._threads = ThreadPoolExecutor(1, "response-store") if storage.is_persistent else None
        self._waiting: list[Write] = []
        self._waiting_done: asyncio.Future[None] | None = None
        self._flushing: asyncio.Task[None] | None = None
        self.num_transactions = 0
        self.on_refused: Callable[[str], None] = lambda id: None
        """Called for a document that another server writes now, before its writer hears of the commit."""

    def add(self, writes: Iterable[Write]) -> asyncio.Future[None]:
        """Done when they are committed; else it raises StoreError."""
        loop = asyncio.get_running_loop()
        self._waiting += writes
        if self._waiting_done is None:
            self._waiting_done = loop.create_future()
            self._waiting_done.add_done_callback(_seen)
        if self._flushing is None:
            self._flushing = loop.create_task(self._flush())
        return self._waiting_done

    async def read(self, ask: Callable[[Storage, float], T]) -> T:
        """What `ask(storage, now)` gives, behind all writes that were added before. Raises StoreError."""
        if self._waiting_done is not None and not self._waiting:
            await asyncio.wait((self._waiting_done,))
        while self._flushing is not None:
            await asyncio.wait((self._flushing,))
        try:
            return await self._run(partial(ask, self._storage, self._clock_s()))
        except StoreError as error:
            raise _logged(error) from None

    async def read_in_time(self, ask: Callable[[Storage, float], T]) -> T:
        """As `read`, for a request: also raises StoreError when it takes too long. `ask` may still be running then, so
        it must not change anything."""
        async with self._answered_in_time():
            return await self.read(ask)

    async def settled(self, done: asyncio.Future[None]) -> None:
        """Waits for `done`, which `add` returned. Raises StoreError, also when it takes too long: then the writes may
        still be committed."""
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
        """A task of its own: it begins in the turn after the one that added the first write."""
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
                        _set(done, error)
        finally:
            self._flushing = None

    async def _commit(self, writes: Sequence[Write]) -> StoreError | None:
        """Returns the error, if any: an unexpected one becomes a StoreError."""
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


def _set(done: asyncio.Future[None], error: StoreError | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _seen(done: asyncio.Future[None]) -> None:
    """An error is the business of who waits; nobody has to."""
    if not done.cancelled():
        done.exception()
