"""Documents in this process's memory.

For: `--response-store memory`, the default. Does not know: threads. Invariant: no call's work grows with the number of
documents, except for those that it removes, so that it may run on the event loop.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice

from .documents import Append, Capacity, Delete, Document, Put, Write


class MemoryStorage:
    """A Storage."""

    is_persistent = False
    takes_over_each_s: float | None = None
    answers_within_s: float | None = None

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._documents: OrderedDict[str, Document] = OrderedDict()
        """In the order of their expiry: each gets the same time to live, at its creation or when it is renewed."""
        self._finished: OrderedDict[str, None] = OrderedDict()
        """Those that are not live, by id; the first of them goes first."""
        self._finished_of: dict[str, OrderedDict[str, None]] = {}
        """The same by owner."""
        self._count_of: Counter[str] = Counter()
        self._events: dict[str, list[bytes]] = {}
        self._log_bytes: Counter[str] = Counter()
        self.held_bytes = 0

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        for write in writes:
            match write:
                case Put(document):
                    self._put(document)
                case Append():
                    self._append(write)
                case Delete(id):
                    self._remove(id)
        self._expire(now_s)
        for write in writes:
            if isinstance(write, Put):
                self._evict_of(write.document.owner)
        while self.held_bytes > self._capacity.max_bytes and self._finished:
            self._remove(next(iter(self._finished)))
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

    def next_expiry_s(self) -> float | None:
        return next((document.expires_s for document in self._documents.values()), None)

    def close(self) -> None:
        for id in list(self._documents):
            self._remove(id)

    def _put(self, document: Document) -> None:
        document = replace(document, continuation=b"")  # nobody goes on after this process
        before = self._documents.get(document.id)
        self.held_bytes += document.size_bytes - (0 if before is None else before.size_bytes)
        self._documents[document.id] = document
        self._count_of[document.owner] += before is None
        if before is not None and document.expires_s > before.expires_s:
            self._documents.move_to_end(document.id)
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
        self.held_bytes -= document.size_bytes + self._log_bytes.pop(id, 0)
        self._finished.pop(id, None)
        owner = document.owner
        self._count_of[owner] -= 1
        if (of_owner := self._finished_of.get(owner)) is not None:
            of_owner.pop(id, None)
        if not self._count_of[owner]:
            del self._count_of[owner]
            self._finished_of.pop(owner, None)

    def _expire(self, now_s: float) -> None:
        while self._documents:
            oldest = next(iter(self._documents.values()))
            if oldest.expires_s > now_s:
                return
            self._remove(oldest.id)

    def _evict_of(self, owner: str) -> None:
        while self._count_of[owner] > self._capacity.max_documents_per_owner and self._finished_of.get(owner):
            self._remove(next(iter(self._finished_of[owner])))
