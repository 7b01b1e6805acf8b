"""Answers retained in memory so that clients can resume them: resumable streams, and answers to retried requests.

Invariants: a running answer without readers is forgotten, and therefore stopped, after the grace period. All answers
together are bounded. Beyond the bound, ended answers without readers are dropped first (oldest first), then the oldest
pieces of the growing answer, then those of other running answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from .journal import Journal

MAX_BYTES: Final = 256 << 20
_ADMISSION_SHARE: Final = 15 / 16
"""Share of the bytes at which no new answer may start; the rest is for answers in progress."""
A = TypeVar("A", bound="KeptAnswer")


@dataclass(eq=False, slots=True, kw_only=True)
class KeptAnswer:
    """Owned by the KeptAnswers that lists it."""

    owner: str
    """The owner, as returned by `current_owner`."""
    key: str
    """Unique for its kind and owner."""
    journal: Journal
    request_bytes: int = 0
    """Held for as long as the answer, besides its journal."""
    retention_s: float | None = None
    """How long it is retained after its end; None: as before its end, for the grace period without readers."""
    stop: Callable[[], None] = field(default=lambda: None)
    """Called when it is forgotten."""
    is_listed: bool = False
    timer: asyncio.TimerHandle | None = None


class KeptAnswers:
    """Used on one event loop."""

    def __init__(self, grace_s: float = 30.0, max_bytes: int = MAX_BYTES) -> None:
        self._grace_s = grace_s
        self._max_bytes = max_bytes
        self._answers: dict[tuple[type[KeptAnswer], str], dict[str, KeptAnswer]] = {}
        """By kind and owner, then by key; oldest first."""
        self._ended: dict[KeptAnswer, None] = {}
        self.held_bytes = 0

    def find(self, kind: type[A], owner: str, key: str) -> A | None:
        return self.of(kind, owner).get(key)

    def of(self, kind: type[A], owner: str) -> Mapping[str, A]:
        """The answers of one kind and owner by key, oldest first."""
        return self._answers.get((kind, owner), {})  # type: ignore[return-value]

    def all(self, kind: type[A]) -> Iterator[A]:
        """A snapshot: the caller may forget them."""
        found = [one for answers in self._answers.values() for one in answers.values()]
        return (one for one in found if isinstance(one, kind))

    def has_capacity(self) -> bool:
        """Whether another answer may start. Forgets ended ones without readers as needed."""
        return self._make_room(int(self._max_bytes * _ADMISSION_SHARE))

    def refusal(self, kind: str) -> str:
        """The error text when there is no room. kind: what the answers are called"""
        return f"{kind} and other retained answers hold {self.held_bytes} bytes, the limit is {self._max_bytes}"

    def add(self, answer: KeptAnswer) -> None:
        self._answers.setdefault((type(answer), answer.owner), {})[answer.key] = answer
        self.held_bytes += answer.request_bytes
        answer.is_listed = True
        answer.journal.on_readers = partial(self._readers_changed, answer)
        self._readers_changed(answer, answer.journal.num_readers)

    def publish(self, answer: KeptAnswer, pieces: Sequence[bytes]) -> None:
        journal = answer.journal
        before = journal.held_bytes
        journal.publish(pieces)
        if not answer.is_listed:
            return
        self.held_bytes += journal.held_bytes - before
        if not self._make_room(self._max_bytes):
            self._shed(answer, len(pieces))

    def end(self, answer: KeptAnswer, error: Exception | None = None) -> None:
        answer.journal.end(error)
        if answer.is_listed:
            self._ended[answer] = None
            if answer.retention_s is not None:
                self._forget_after(answer, answer.retention_s)

    def forget(self, answer: KeptAnswer) -> None:
        """It can no longer be found; its current readers get what it holds. Idempotent."""
        if not answer.is_listed:
            return
        answer.is_listed = False
        place = type(answer), answer.owner
        del self._answers[place][answer.key]
        if not self._answers[place]:
            del self._answers[place]
        self._ended.pop(answer, None)
        self.held_bytes -= answer.journal.held_bytes + answer.request_bytes
        self._forget_after(answer, None)
        answer.stop()

    def _make_room(self, max_bytes: int) -> bool:
        if self.held_bytes > max_bytes:
            for answer in [one for one in self._ended if not one.journal.num_readers]:
                self.forget(answer)
                if self.held_bytes <= max_bytes:
                    break
        return self.held_bytes <= max_bytes

    def _shed(self, growing: KeptAnswer, num_new: int) -> None:
        """Drops its oldest pieces, except the new ones, then those of other running answers."""
        self.held_bytes -= growing.journal.shed(self.held_bytes - self._max_bytes, keep=num_new)
        for other in self.all(KeptAnswer):
            if self.held_bytes <= self._max_bytes:
                return
            if other is not growing and not other.journal.has_ended:
                self.held_bytes -= other.journal.shed(self.held_bytes - self._max_bytes, keep=0)

    def _readers_changed(self, answer: KeptAnswer, count: int) -> None:
        if not answer.journal.has_ended or answer.retention_s is None:
            self._forget_after(answer, None if count else self._grace_s)

    def _forget_after(self, answer: KeptAnswer, delay_s: float | None) -> None:
        if answer.timer is not None:
            answer.timer.cancel()
            answer.timer = None
        if delay_s is not None and answer.is_listed:
            answer.timer = asyncio.get_running_loop().call_later(delay_s, self.forget, answer)
