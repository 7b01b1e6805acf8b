"""What a store keeps, and what every kind of store can do: documents, and the logs of those that are being written.

For: the stores and ResponseStore. Does not know: what a document says. Invariants: all writes of one call are committed
together or not at all; a document is seen by its owner alone; a store's methods are called by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from llmbackend.core.errors import ErrorCode, TritonError

Kind = Literal["response", "conversation"]


class StoreError(TritonError):
    """A store that cannot be used or cannot take a write. Its text says why, to operators; a client gets no paths and
    addresses."""

    def __init__(self, reason: str) -> None:
        super().__init__("the store of responses can not be used now, see the server's log", ErrorCode.UNAVAILABLE)
        self._reason = reason

    def __str__(self) -> str:
        return self._reason


@dataclass(frozen=True, slots=True)
class Document:
    """One object of the API, as its owner gets it."""

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
    """JSON: a list of what the document was made from (a response's input items), or consists of."""
    parent: str = ""
    """The document that this one goes on behind; "" for none."""
    is_live: bool = False
    """Whether it is still being written. A live document is not evicted."""
    continuation: bytes = b""
    """What another process needs to go on with a live document, besides the progress in its log; b"": none can."""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.items) + len(self.continuation) + len(self.id) + len(self.owner)


@dataclass(frozen=True, slots=True)
class Put:
    """Adds a document or replaces it. One that is not live needs no progress any more."""

    document: Document


@dataclass(frozen=True, slots=True)
class Append:
    """One step of a live document's log."""

    id: str
    first: int
    """The number of the first of `events`."""
    events: tuple[bytes, ...]
    progress: bytes
    """What led to the events, for a process that goes on with the document."""

    @property
    def size_bytes(self) -> int:
        return len(self.progress) + sum(map(len, self.events))


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes a document with its log, if it is there."""

    id: str


Write = Put | Append | Delete


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one store may hold. What is too much goes, the oldest first."""

    max_bytes: int
    max_documents_per_owner: int


class Storage(Protocol):
    """One kind of store. Every method may raise StoreError."""

    is_persistent: bool
    """Whether its documents are there after a restart of the server. Then its methods wait, for a disk or a network."""

    takes_over_each_s: float | None
    """How often `live` is asked again, where several servers share the store."""

    answers_within_s: float | None
    """How long a request waits for the store before it is refused; None: as long as it takes."""

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        """All writes in one transaction; then removes what has expired by `now_s`, and what exceeds the capacity.
        Returns the ids of live documents that another server writes now: nothing was written to these."""

    def get(self, id: str, now_s: float) -> Document | None:
        """None for one that is not there, or has expired."""

    def events(self, id: str, first: int, max_bytes: int) -> list[bytes]:
        """Committed events from number `first` on: at least one if there are any, and not many more than max_bytes."""

    def num_events(self, id: str) -> int:
        """How many are committed."""

    def progress(self, id: str) -> list[bytes]:
        """A live document's progress, by step."""

    def live(self) -> list[Document]:
        """The live documents that no running server writes, which from now on are the caller's."""

    def next_expiry_s(self) -> float | None:
        """When the next document expires; None where none does, or the store sees to it by itself."""

    def close(self) -> None: ...
