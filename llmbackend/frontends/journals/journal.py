"""Journal: the numbered events of one stream, for any number of readers; and the record of a resumable stream.

Invariants: events are numbered 0, 1, 2 …; a reader gets each event after its position once, in order, and then the end,
or an error for events that are no longer held. A record contains what another host needs to regenerate the stream; its
deltas are in the order of their events, and of two records the one with the higher epoch is valid.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec
from starlette.requests import Request

from llmbackend.core.messages import Resume

LoadEvents = Callable[[int], Awaitable[Sequence[bytes]]]
"""Loads events from a number on, at least one."""
_STEP_BYTES: Final = 256 << 10
"""Approximate size of the events that a reader gets at once."""


class EventsGoneError(Exception):
    """A reader asked for events that are no longer held."""


@dataclass(frozen=True, slots=True)
class Events:
    """Consecutive events."""

    first: int
    """The number of the first one."""
    parts: tuple[bytes, ...]


class Journal:
    """Used only on the event loop."""

    def __init__(self, max_bytes: int, next_number: int = 0, load: LoadEvents | None = None) -> None:
        """next_number: number of the next published event. load: reads events that are no longer held in memory"""
        self._max_bytes = max_bytes
        self._load = load
        self._held: deque[bytes] = deque()
        self.held_bytes = 0
        self.first_held = next_number
        """The number of the oldest event that is held."""
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
        self._held.extend(events)
        self.held_bytes += sum(map(len, events))
        self.shed(self.held_bytes - self._max_bytes, keep=1)
        self._wake()

    def shed(self, num_bytes: int, keep: int) -> int:
        """Drops the oldest events until `num_bytes` bytes are free, but keeps the last `keep` events. Returns the bytes
        dropped."""
        before = self.held_bytes
        while before - self.held_bytes < num_bytes and len(self._held) > keep:
            self.held_bytes -= len(self._held.popleft())
            self.first_held += 1
        return before - self.held_bytes

    def end(self, error: Exception | None = None) -> None:
        """error: raised to readers instead of the end."""
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._wake()

    async def follow(self, after: int = -1, quiet_s: float | None = None) -> AsyncGenerator[Events, None]:
        """Yields the events after number `after`, a limited size of them each time; none after `quiet_s` without one.
        Raises EventsGoneError for events that are no longer held, and the error of `end`."""
        number = after + 1
        with self.reading():
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

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Counts one more reader while the context is active."""
        self._count_readers(1)
        try:
            yield
        finally:
            self._count_readers(-1)

    def _from(self, number: int) -> Events:
        """Some of the held events, counted from the nearer end: most readers need only the newest few."""
        skipped, size_bytes = number - self.first_held, 0
        if 2 * skipped < len(self._held):
            events: Iterable[bytes] = islice(self._held, skipped, None)
        else:
            events = reversed(list(islice(reversed(self._held), len(self._held) - skipped)))
        parts = []
        for event in events:
            parts.append(event)
            size_bytes += len(event)
            if size_bytes >= _STEP_BYTES:
                break
        return Events(number, tuple(parts))

    async def _loaded(self, number: int) -> Events:
        parts = () if self._load is None else tuple(await self._load(number))
        if not parts:
            raise EventsGoneError(f"the events before number {self.first_held} are no longer available")
        return Events(number, parts)

    async def _wait(self, timeout_s: float | None) -> bool:
        """Waits until something changes; returns False after `timeout_s`."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.append(waiter)
        alarm = None if timeout_s is None else loop.call_later(timeout_s, settle, waiter)
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
            settle(waiter)

    def _count_readers(self, change: int) -> None:
        self.num_readers += change
        self.on_readers(self.num_readers)


def settle(waiter: asyncio.Future[Any]) -> None:
    """Idempotent."""
    if not waiter.done():
        waiter.set_result(None)


RECORDING: Final = "llmbackend.stream_recording"
"""Key in a request's scope: the Recording of the stream that it starts."""
StreamDelta = tuple[int, bytes]
"""(index of the inference in the stream, delta of one of its responses)"""


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream started."""

    key: str
    """The stream's name."""
    epoch: int = 0
    """How many times another host has taken it over."""
    owner: str = ""
    """The owner, as returned by `current_owner`."""
    path: str
    """Path of the requests that may resume the stream."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    request: bytes = b""
    """The body of the request that started it."""
    identity: bytes = b""
    """Its ids and timestamps, encoded by its endpoint."""


class StreamRecord(msgspec.Struct, frozen=True):
    """A stream so far."""

    head: StreamHead
    deltas: tuple[StreamDelta, ...] = ()
    num_events: int = 0
    """Number of events made from the deltas."""

    @property
    def size_bytes(self) -> int:
        return len(self.head.request) + sum(len(delta) for _, delta in self.deltas)


class Recording:
    """The record of one stream, written by its endpoint. Used only on the event loop.

    The endpoint takes `identity` and `resume` from it, passes each `delta` as it reads responses, and reads the
    responses of several inferences in the order given by `takes`.
    """

    def __init__(self, known: StreamRecord | None = None) -> None:
        """known: the record so far, if the stream is being regenerated"""
        self.known = known
        self.identity = b"" if known is None else known.head.identity
        self.request = b""
        """This and `identity` are set by the endpoint of a new stream."""
        self.opened: Callable[[], None] = lambda: None
        """Called when the stream can be resumed."""
        self._order = deque(() if known is None else (index for index, _ in known.deltas))
        self._new: list[StreamDelta] = []

    @classmethod
    def of(cls, http: Request) -> Recording | None:
        return http.scope.get(RECORDING)

    @property
    def num_known(self) -> int:
        return 0 if self.known is None else len(self.known.deltas)

    def resume(self, index: int) -> Resume:
        deltas = () if self.known is None else self.known.deltas
        return Resume(tuple([delta for one, delta in deltas if one == index]), replays=True)

    def takes(self, index: int) -> bool:
        """Whether the next response may belong to this inference."""
        return not self._order or self._order[0] == index

    def delta(self, index: int, delta: bytes) -> None:
        """Records that a response of this inference was read. delta: b"": it has none"""
        if self._order:
            self._order.popleft()
        if delta:
            self._new.append((index, delta))

    def take_new(self) -> tuple[StreamDelta, ...]:
        """Deltas since the last call."""
        new, self._new = tuple(self._new), []
        return new
