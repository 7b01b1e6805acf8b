"""Copies of resumable streams on other hosts, which continue a stream from its copy when a client resumes it there.

Invariants: each stream is copied to one other host, if there is one, as it grows. When that host is lost, all streams
are copied to another one at once. Events are sent after they were copied, unless no other host answers. A stream that
was taken over has a higher epoch; its former host is refused with its next message and ends it. A record that lacks an
event that the client has is not taken over. A stream counts as unknown only after every host was asked. What is held
for others is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec

from llmbackend.core.errors import TritonError, unavailable
from llmbackend.frontends.errors import log_bug

from .journal import StreamDelta, StreamHead, StreamRecord, settle

log = logging.getLogger(__name__)
TOPIC: Final = "streams"
_CALL_TIMEOUT_S: Final = 2.0
_RETRY_INTERVAL_S: Final = 0.5
"""Pause before retrying a host that did not answer."""
_MESSAGE_BYTES: Final = 1 << 20
"""Approximate size of the records in one message."""
MAX_REQUEST_BYTES: Final = 1 << 20
"""A stream of a larger request is not copied."""
_MAX_BYTES: Final = 256 << 20
"""Held for other hosts; beyond it, the records that have not grown for longest are dropped."""
_RETENTION_S: Final = 600.0
"""How long a record is retained without an update."""
_FORGET_INTERVAL_S: Final = 60.0
_TAKEN_RETENTION_S: Final = 30.0
"""How long a record is retained after it was taken over."""
_MAX_TAKEN: Final = 10_000
"""Streams whose epoch is remembered after they were taken over."""


class Peers(Protocol):
    """The other hosts. Used on the event loop."""

    def live(self) -> Sequence[str]:
        """Their ids, in order of preference."""

    def are_all_live(self) -> bool:
        """Whether all other hosts are known and reachable."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` is called when `live` has changed."""

    async def call(self, peer: str, topic: str, payload: bytes) -> bytes:
        """The answer of that host's handler of `topic`. Raises TritonError."""

    def on_call(self, topic: str, handler: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        """handler: (id of the calling host, payload) → answer"""


HandOver = Callable[[str, str, str], bool]
"""(key, owner, path): ends a stream of this host, which another host continues; returns whether there was one."""
Regenerate = Callable[[StreamRecord], Awaitable[None]]
"""Has an endpoint regenerate a stream; returns once it is open. Raises TritonError."""


class _Begin(msgspec.Struct, frozen=True, tag="begin"):
    record: StreamRecord


class _Step(msgspec.Struct, frozen=True, tag="step"):
    """first: position of `deltas`, some of which may be known. num_events: events made from all deltas so far"""

    key: str
    epoch: int
    first: int
    deltas: tuple[StreamDelta, ...]
    num_events: int


class _End(msgspec.Struct, frozen=True, tag="end"):
    key: str


class _Batch(msgspec.Struct, frozen=True, tag="batch"):
    items: tuple[_Begin | _Step | _End, ...]


class _Take(msgspec.Struct, frozen=True, tag="take"):
    """after: the last event that the client has; -1 = none"""

    key: str
    owner: str
    path: str
    after: int


class _Refused(msgspec.Struct, frozen=True):
    """superseded: keys of streams that now have a higher epoch. unknown: keys whose record must be sent again"""

    superseded: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


_encode = msgspec.msgpack.encode
_decode_call = msgspec.msgpack.Decoder(_Batch | _Take).decode
_decode_refused = msgspec.msgpack.Decoder(_Refused).decode
_decode_taken = msgspec.msgpack.Decoder(StreamRecord | None).decode


@dataclass(eq=False, slots=True)
class _Growing:
    """A record of a stream, from this or another host."""

    head: StreamHead
    deltas: list[StreamDelta]
    size_bytes: int
    num_events: int
    num_replayed: int = 0
    """How many of `deltas` the endpoint will add again."""
    superseded: Callable[[], None] = field(default=lambda: None)
    news_s: float = 0.0

    @classmethod
    def of(cls, record: StreamRecord) -> _Growing:
        return cls(record.head, list(record.deltas), record.size_bytes, record.num_events)

    @property
    def record(self) -> StreamRecord:
        return StreamRecord(self.head, tuple(self.deltas), self.num_events)

    def grow(self, deltas: Sequence[StreamDelta], num_events: int) -> int:
        """Returns the bytes added."""
        self.deltas.extend(deltas)
        self.num_events = max(self.num_events, num_events)
        added = sum(len(delta) for _, delta in deltas)
        self.size_bytes += added
        return added

    def without_replayed(self, deltas: Sequence[StreamDelta]) -> Sequence[StreamDelta]:
        """The deltas that the record of a regenerated stream does not have yet."""
        num_known = min(self.num_replayed, len(deltas))
        self.num_replayed -= num_known
        return deltas[num_known:]

    def is_for(self, owner: str, path: str, after: int) -> bool:
        return (self.head.owner, self.head.path) == (owner, path) and after < self.num_events


class StreamCopies:
    """The copies of a host's ResumableStreams, and the records it holds for others. Used only on the event loop."""

    def __init__(self, peers: Peers, regenerators: Mapping[str, Regenerate], hand_over: HandOver) -> None:
        """regenerators: by prefix of the stream's path, longest prefix first"""
        self._peers = peers
        self._regenerators = regenerators
        self._hand_over = hand_over
        self._own: dict[str, _Growing] = {}
        self._peer: str | None = None
        """The host that has all records of `_own` that are not waiting."""
        self._failed_s: dict[str, float] = {}
        """When a peer last failed to accept what was sent (time.monotonic())."""
        self._waiting: list[tuple[_Begin | _Step | _End | None, Callable[[], None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._held = HeldRecords()
        self._forgetting: asyncio.TimerHandle | None = None
        peers.on_call(TOPIC, self._answer)
        peers.on_change(self._peers_changed)
        self._peers_changed()

    @property
    def are_active(self) -> bool:
        """Thread-safe."""
        return self._peer is not None

    @property
    def holder(self) -> str | None:
        """The host with the copies."""
        return self._peer

    @property
    def num_held(self) -> int:
        return len(self._held)

    # --- streams of this host -----------------------------------------------------------------------------------------

    def begin(self, record: StreamRecord, superseded: Callable[[], None]) -> asyncio.Future[None]:
        """Adds a new stream, or a regenerated one, whose known deltas will be added again. The future is done when the
        record is copied, or cannot be. superseded: called when another host has taken the stream over"""
        done, key = asyncio.get_running_loop().create_future(), record.head.key
        self._held.drop(key)
        growing = self._own[key] = _Growing.of(record)
        growing.num_replayed, growing.superseded = len(record.deltas), superseded
        self._add(_Begin(growing.record), partial(settle, done))
        return done

    def add(self, key: str, deltas: Sequence[StreamDelta], num_events: int, then: Callable[[], None]) -> None:
        """Calls `then` when the deltas are copied, or cannot be; in the order of the calls of `add`. num_events: of the
        stream, including those that `then` makes visible"""
        growing = self._own.get(key)
        deltas = () if growing is None else growing.without_replayed(deltas)
        if growing is None or not (deltas or num_events > growing.num_events):
            self._add(None, then)
            return
        first = len(growing.deltas)
        growing.grow(deltas, num_events)
        self._add(_Step(key, growing.head.epoch, first, tuple(deltas), num_events), then)

    def end(self, key: str) -> None:
        """Marks the end of the stream, which can no longer be resumed."""
        if self._own.pop(key, None) is not None:
            self._add(_End(key), lambda: None)

    def _add(self, item: _Begin | _Step | _End | None, then: Callable[[], None]) -> None:
        self._waiting.append((item, then))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        """A task, so that it starts in the turn after the first item."""
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                try:
                    await self._copy([item for item, _ in waiting if item is not None])
                except Exception as error:
                    log_bug("unexpected error while copying streams", error)
                for _, then in waiting:
                    _call(then)
        finally:
            self._flushing = None

    async def _copy(self, items: Sequence[_Begin | _Step | _End]) -> None:
        """Sends the items to the peer with the other records; on failure, everything to the next one that answers."""
        live = self._peers.live()
        if self._peer in live and await self._sent(self._peer, items):
            return
        if self._peer is not None:
            log.warning("no longer copying streams to host '%s'", self._peer)
            self._peer = None
        now_s = time.monotonic()
        for peer in live:
            if self._failed_s.get(peer, -_RETRY_INTERVAL_S) + _RETRY_INTERVAL_S < now_s and await self._has_all(peer):
                self._peer = peer
                return
        if live and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_RETRY_INTERVAL_S, self._try_again)

    def _peers_changed(self) -> None:
        now_s = time.monotonic()
        self._failed_s = {peer: at_s for peer, at_s in self._failed_s.items() if at_s + _RETRY_INTERVAL_S > now_s}
        if self._peer is not None and self._peer not in self._peers.live():
            log.warning("host '%s', to which streams were copied, is gone", self._peer)
            self._peer = None
        self._find_peer()

    def _try_again(self) -> None:
        self._retry = None
        self._find_peer()

    def _find_peer(self) -> None:
        if self._peer is None:
            self._add(None, lambda: None)

    async def _has_all(self, peer: str) -> bool:
        return all([await self._sent(peer, some) for some in _in_messages(self._own.values())])

    async def _sent(self, peer: str | None, items: Sequence[_Begin | _Step | _End]) -> bool:
        if peer is None:
            return False
        if not items:
            return True
        try:
            refused = _decode_refused(await self._call(peer, _encode(_Batch(tuple(items)))))
        except (TritonError, msgspec.MsgspecError) as error:
            log.debug("streams cannot be copied to host '%s': %s", peer, error)
            self._failed_s[peer] = time.monotonic()
            return False
        for key in refused.superseded:
            if (growing := self._own.pop(key, None)) is not None:
                growing.superseded()
        again = [self._own[key] for key in refused.unknown if key in self._own]
        return all([await self._sent(peer, some) for some in _in_messages(again)])

    async def _call(self, peer: str, payload: bytes) -> bytes:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await self._peers.call(peer, TOPIC, payload)
        except TimeoutError:
            raise unavailable(f"it did not answer for {_CALL_TIMEOUT_S:g} s") from None

    # --- streams of other hosts ---------------------------------------------------------------------------------------

    async def take(self, key: str, owner: str, path: str, after: int) -> StreamRecord | None:
        """Takes over another host's stream. Returns the newest record of all hosts, or None if no host has one for this
        owner and path with the client's last event `after`. Raises TritonError UNAVAILABLE if a host that may have it
        cannot be asked."""
        asked = _encode(_Take(key, owner, path, after))
        is_all = self._peers.are_all_live()
        answers = await asyncio.gather(*(self._record_of(peer, asked) for peer in self._peers.live()))
        found = [
            taken.record for taken in (_Taken(self._held.take(key, owner, path, after)), *answers) if taken is not None
        ]
        records = (one for one in found if one is not None)
        newest = max(records, key=lambda one: (one.head.epoch, len(one.deltas)), default=None)
        if newest is None and not (is_all and all(answers)):
            raise unavailable(f"the host that has the stream '{key}' cannot be reached; try again later")
        return newest

    async def regenerate(self, record: StreamRecord) -> None:
        """Has the stream's endpoint regenerate it with the next epoch; returns once it is open. Raises TritonError."""
        path = record.head.path
        regenerate_stream = next(make for beginning, make in self._regenerators.items() if path.startswith(beginning))
        log.info("stream %s is resumed after %d responses", record.head.key, len(record.deltas))
        await regenerate_stream(record)

    async def _record_of(self, peer: str, payload: bytes) -> _Taken | None:
        with suppress(TritonError, msgspec.MsgspecError):
            return _Taken(_decode_taken(await self._call(peer, payload)))
        return None

    async def _answer(self, peer: str, payload: bytes) -> bytes:
        call = _decode_call(payload)
        answer: _Refused | StreamRecord | None
        if isinstance(call, _Batch):
            self._end_superseded(call.items)
            answer = self._held.add(call.items)
        else:
            answer = self._record_for_taker(call)
        self._forget_later()
        return _encode(answer)

    def _end_superseded(self, items: Sequence[_Begin | _Step | _End]) -> None:
        """Ends this host's streams that the sender of the items has taken over. If this host was cut off and now copies
        to a third one, only these items tell it so."""
        for head in (item.record.head for item in items if isinstance(item, _Begin)):
            own = self._own.get(head.key)
            if own is not None and own.head.epoch < head.epoch:
                del self._own[head.key]
                own.superseded()

    def _forget_later(self) -> None:
        if self._held and self._forgetting is None:
            self._forgetting = asyncio.get_running_loop().call_later(_FORGET_INTERVAL_S, self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        self._held.forget_old()
        self._forget_later()

    def _record_for_taker(self, call: _Take) -> StreamRecord | None:
        """The record is retained: its taker may end before another host has a copy."""
        own = self._own.get(call.key)
        if own is not None and own.is_for(call.owner, call.path, call.after):
            del self._own[call.key]
            self._held.put(own.record)
            self._hand_over(call.key, call.owner, call.path)
        return self._held.take(call.key, call.owner, call.path, call.after)


class HeldRecords:
    """The records that a host holds for others."""

    def __init__(self, max_bytes: int = _MAX_BYTES, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock_s = clock_s
        self._records: OrderedDict[str, _Growing] = OrderedDict()
        """The least recently updated record first."""
        self._bytes = 0
        self._taken: OrderedDict[str, int] = OrderedDict()
        """The epochs of streams that were taken over from here."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, items: Sequence[_Begin | _Step | _End]) -> _Refused:
        superseded: dict[str, None] = {}
        unknown: dict[str, None] = {}
        for item in items:
            match item:
                case _End(key):
                    self.drop(key)
                case _Begin(record) if self._is_newest(record.head.key, record.head.epoch):
                    self.put(record)
                case _Step(key, epoch, first, deltas, num_events) if self._is_newest(key, epoch):
                    growing = self._records.get(key)
                    if growing is None or growing.head.epoch != epoch or first > len(growing.deltas):
                        unknown[key] = None
                        continue
                    self._bytes += growing.grow(deltas[len(growing.deltas) - first :], num_events)
                    growing.news_s = self._clock_s()
                    self._records.move_to_end(key)
                case _Begin(record):
                    superseded[record.head.key] = None
                case _Step(key):
                    superseded[key] = None
        self.forget_old()
        return _Refused(tuple(superseded), tuple(unknown))

    def take(self, key: str, owner: str, path: str, after: int) -> StreamRecord | None:
        """Refuses epochs older than the taker's from now on. The record is retained for a while, because its taker may
        end before another host has a copy."""
        self.forget_old()
        growing = self._records.get(key)
        if growing is None or not growing.is_for(owner, path, after):
            return None
        record = growing.record
        self._taken[key] = record.head.epoch + 1
        if len(self._taken) > _MAX_TAKEN:
            self._taken.popitem(last=False)
        growing.head = msgspec.structs.replace(growing.head, epoch=record.head.epoch + 1)
        growing.news_s = self._clock_s() - _RETENTION_S + _TAKEN_RETENTION_S
        self._records.move_to_end(key, last=False)
        return record

    def _is_newest(self, key: str, epoch: int) -> bool:
        held = self._records.get(key)
        return epoch >= max(self._taken.get(key, 0), 0 if held is None else held.head.epoch)

    def put(self, record: StreamRecord) -> None:
        self.drop(record.head.key)
        growing = self._records[record.head.key] = _Growing.of(record)
        growing.news_s = self._clock_s()
        self._bytes += growing.size_bytes

    def drop(self, key: str) -> None:
        if (growing := self._records.pop(key, None)) is not None:
            self._bytes -= growing.size_bytes

    def forget_old(self) -> None:
        while self._records:
            key, oldest = next(iter(self._records.items()))
            if self._bytes <= self._max_bytes and oldest.news_s > self._clock_s() - _RETENTION_S:
                return
            self.drop(key)


class _Taken(NamedTuple):
    """The answer of a host that was asked for a record; truthy even without one."""

    record: StreamRecord | None


def _call(then: Callable[[], None]) -> None:
    """An error in one stream does not stop the others."""
    try:
        then()
    except Exception as error:
        log_bug("unexpected error in a copied stream", error)


def _in_messages(records: Iterable[_Growing]) -> Iterator[list[_Begin]]:
    some: list[_Begin] = []
    size_bytes = 0
    for growing in list(records):  # they may change in the meantime
        some.append(_Begin(growing.record))
        size_bytes += growing.size_bytes
        if size_bytes > _MESSAGE_BYTES:
            yield some
            some, size_bytes = [], 0
    yield some
