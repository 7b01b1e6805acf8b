"""Journal: the numbered events of one stream, which any number of readers follow, each from its own place.

For: streams that outlive the connection of their client. Does not know: what an event says, who writes it. Invariants:
events have the numbers 0, 1, 2 …; a reader gets each event behind its place once, in order, and then the end; what the
journal holds is bounded: older events are read from where they were committed, or are gone, which a reader is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice

LoadEvents = Callable[[int], Awaitable[Sequence[bytes]]]
"""Events from a number on, at least one."""


class EventsGoneError(Exception):
    """A reader asked for events that are no longer held."""


@dataclass(frozen=True, slots=True)
class Events:
    """Some events in a row."""

    first: int
    """The number of the first one."""
    parts: tuple[bytes, ...]


class Journal:
    """Used on the event loop alone."""

    def __init__(self, max_bytes: int, next_number: int = 0, load: LoadEvents | None = None) -> None:
        """next_number: of the first event that will be published here. load: where events are that are not held."""
        self._max_bytes = max_bytes
        self._load = load
        self._held: deque[bytes] = deque()
        self.held_bytes = 0
        self.first_held = next_number
        """The number of the oldest event that is held here."""
        self._waiters: list[asyncio.Future[None]] = []
        self._error: Exception | None = None
        self.has_ended = False
        self.num_readers = 0
        self.on_readers: Callable[[int], None] = lambda count: None
        """Called when the number of readers has changed."""

    @property
    def next_number(self) -> int:
        return self.first_held + len(self._held)

    def publish(self, events: Sequence[bytes]) -> None:
        """Shows further events to the readers."""
        self._held.extend(events)
        self.held_bytes += sum(map(len, events))
        while self.held_bytes > self._max_bytes and len(self._held) > 1:
            self.held_bytes -= len(self._held.popleft())
            self.first_held += 1
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No further event follows. error: what readers are told instead of the end."""
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._wake()

    async def follow(self, after: int = -1, quiet_s: float | None = None) -> AsyncGenerator[Events, None]:
        """The events behind number `after`, all that are there at once; none when `quiet_s` passed without one.

        Raises EventsGoneError for events that are not held, and the error that the journal ended with."""
        self._count_readers(1)
        try:
            number = after + 1
            while True:
                if number < self.first_held:
                    yield (found := await self._loaded(number))
                elif number < self.next_number:
                    yield (found := self._from(number))
                elif self.has_ended:
                    break
                else:
                    if not await self._wait(quiet_s):
                        yield Events(number, ())
                    continue
                number = found.first + len(found.parts)
            if self._error is not None:
                raise self._error
        finally:
            self._count_readers(-1)

    def _from(self, number: int) -> Events:
        """A reader that keeps up takes the few newest ones, however many are held."""
        newest = list(islice(reversed(self._held), self.next_number - number))
        return Events(number, tuple(reversed(newest)))

    async def _loaded(self, number: int) -> Events:
        parts = () if self._load is None else tuple(await self._load(number))
        if not parts:
            raise EventsGoneError(f"the events before number {self.first_held} are no longer held")
        return Events(number, parts)

    async def _wait(self, timeout_s: float | None) -> bool:
        """Until something changes; False when `timeout_s` passed first."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.append(waiter)
        alarm = None if timeout_s is None else loop.call_later(timeout_s, _set, waiter)
        try:
            await waiter
            return waiter not in self._waiters
        finally:
            if alarm is not None:
                alarm.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _set(waiter)

    def _count_readers(self, change: int) -> None:
        self.num_readers += change
        self.on_readers(self.num_readers)


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
