"""Publishes which blocks the prefix cache has: to hosts, and to external routers as vLLM's KV events over ZeroMQ.

Used by the engine core. Invariants: without a receiver there is no journal; the events are vLLM's in array form ([tag,
field, …]), in batches [time, events, data_parallel_rank] with a topic and a sequence number that starts at 0 in each
process; the first event of a process is AllBlocksCleared. The engine's thread never waits: a separate thread owns the
sockets.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from array import array
from collections import deque
from typing import Final

import msgspec
import zmq

from ..config import KVEventsConfig
from ..messages import BlockChanges
from .kv_cache import KVCacheManager
from .prefix_cache import BlockJournal, FoundBlock

logger = logging.getLogger(__name__)

MEDIUM: Final = "GPU"
"""vLLM's name for the device; it also covers blocks in host memory."""
SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_QUEUE: Final = "inproc://batches"
_STOP: Final = b""

_encode = msgspec.msgpack.Encoder().encode


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The tag, the name of the class, comes first."""


class BlockStored(_Event):
    """Consecutive blocks, the first one after `parent_block_hash`.

    token_ids   of all of them
    block_size  tokens per block
    lora_id     always None
    lora_name   the clients' name; several loads can have it
    extra_keys  for the first block of a sequence: what distinguishes it besides its tokens (tenant, the engine's name
                of the adapter if it is another one, salt)
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class KVEvents:
    """A BlockListener. One thread calls it."""

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        """Raises ValueError if an endpoint cannot be bound."""
        self._block_size = block_size
        self._rank = config.data_parallel_rank
        self.lora_names: dict[str, str] = {}
        """The clients' names of adapters that have another name in the engine."""
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]
        self._context = zmq.Context()
        self._queue = self._context.socket(zmq.PAIR)
        self._queue.set_hwm(0)
        self._queue.bind(_QUEUE)
        try:
            publisher = _Publisher(self._context, config)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            in_use = error.errno == errno.EADDRINUSE
            hint = " (by this model, if it is being reloaded: unload it first)" if in_use else ""
            raise ValueError(
                f"engine argument 'kv_events_config': {config.own_endpoint}"
                f"{f' or {config.own_replay_endpoint}' if config.own_replay_endpoint else ''} cannot be bound: "
                f"{error.strerror}{hint}"
            ) from None
        self._thread = threading.Thread(target=publisher.run, name="kv-events", daemon=True)
        self._thread.start()

    def stored(self, block: FoundBlock, before: bytes | None, tokens: bytes) -> None:
        last, parent = self._events[-1] if self._events else None, None if before is None else _number(before)
        if not (isinstance(last, BlockStored) and parent is not None and last.block_hashes[-1] == parent):
            tenant, adapter, salt = block.salt
            lora_name = self.lora_names.get(adapter, adapter)
            load = adapter if adapter != lora_name else ""
            keys = tuple(key for key in (tenant, load, salt) if key) if parent is None else ()
            last = BlockStored(
                [], parent, [], self._block_size, None, MEDIUM, lora_name or None, [keys] if keys else None
            )
            self._events.append(last)
        elif last.extra_keys is not None:
            last.extra_keys.append(None)
        last.block_hashes.append(_number(block.hash))
        last.token_ids.extend(array("i", tokens))

    def removed(self, block_hash: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(_number(block_hash))
        else:
            self._events.append(BlockRemoved([_number(block_hash)], MEDIUM))

    def send(self) -> None:
        """Publishes the events since the last call. The initial AllBlocksCleared waits for the next event."""
        if self._events and not isinstance(self._events[-1], AllBlocksCleared):
            self._queue.send(_encode(EventBatch(time.time(), self._events, self._rank)))
            self._events = []

    def close(self) -> None:
        self._queue.send(_STOP)
        self._thread.join()
        self._queue.close(linger=0)
        self._context.term()


class _Publisher:
    """Publishes batches and replays those that a subscriber missed. Owned by its thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: KVEventsConfig) -> None:
        """Raises ZMQError."""
        self._topic = config.topic.encode()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_sent = 0
        self._batches = context.socket(zmq.PAIR)
        self._batches.set_hwm(0)
        self._batches.connect(_QUEUE)
        self._subscribers = context.socket(zmq.PUB)
        self._subscribers.set_hwm(config.hwm)
        self._poller = zmq.Poller()
        self._poller.register(self._batches, zmq.POLLIN)
        _bind(self._subscribers, config.own_endpoint)
        self._replays: zmq.Socket[bytes] | None = None
        if config.own_replay_endpoint is not None:
            self._replays = context.socket(zmq.ROUTER)
            self._replays.sndhwm = config.buffer_steps + 1  # a full queue drops batches: one replay with its end fits
            _bind(self._replays, config.own_replay_endpoint)
            self._poller.register(self._replays, zmq.POLLIN)

    def run(self) -> None:
        while True:
            ready = dict(self._poller.poll())
            if self._batches in ready:  # first: a replay includes all batches sent before it was requested
                batch = self._batches.recv()
                if batch == _STOP:
                    break
                self._publish(batch)
            elif self._replays is not None:
                self._replay(self._replays, self._replays.recv_multipart())
        for one in (self._batches, self._subscribers, self._replays):
            if one is not None:
                one.close(linger=0)

    def _publish(self, batch: bytes) -> None:
        number = self._num_sent.to_bytes(SEQUENCE_BYTES, "big")
        self._num_sent += 1
        self._sent.append((number, batch))
        self._subscribers.send_multipart((self._topic, number, batch))

    def _replay(self, replays: zmq.Socket[bytes], request: list[bytes]) -> None:
        """A request is an empty frame and a number: sends all batches from that number on, then an end marker."""
        client, *frames = request
        if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_BYTES:
            logger.warning("a request for a replay of KV events has frames of %s bytes, expected 0 and 8",
                           [len(frame) for frame in frames])  # fmt: skip
            return
        for number, batch in self._sent:
            if number >= frames[1]:
                replays.send_multipart((client, b"", number, batch))
        replays.send_multipart((client, b"", END_OF_REPLAY, b""))


def _bind(endpoint_socket: zmq.Socket[bytes], endpoint: str) -> None:
    endpoint_socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
    endpoint_socket.bind(endpoint)


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash, "little")


class PrefixPublishing:
    def __init__(self, kv_cache: KVCacheManager, events: KVEventsConfig | None) -> None:
        """Raises ValueError if an endpoint of the KV events cannot be bound."""
        self._kv_cache = kv_cache
        self._events = KVEvents(events, kv_cache.block_size) if events is not None and events.is_on else None
        self._journal: BlockJournal | None = None
        self._is_wanted = False
        if self._events is not None:
            self._begin()

    @property
    def has_work(self) -> bool:
        """Whether there are changes for hosts even if nothing is computed."""
        return self._is_wanted and self._journal is not None and self._journal.has_changes

    def publish(self, is_wanted: bool) -> None:
        """Sets whether hosts get changes from now on; true also requests a snapshot."""
        self._is_wanted = is_wanted
        if is_wanted:
            (self._journal or self._begin()).ask_for_snapshot()
        elif self._events is None:
            self._journal = None
            self._kv_cache.set_journal(None)

    def name_adapter(self, name: str, served_name: str) -> None:
        """Called before blocks of the adapter are computed. served_name: the clients' name for it."""
        if self._events is not None:
            self._events.lora_names[name] = served_name

    def take(self) -> BlockChanges | None:
        """The changes for hosts after a step; also publishes KV events."""
        if self._journal is None:
            return None
        if self._events is not None:
            self._events.send()
        changes = self._journal.take()
        return changes if self._is_wanted else None

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def _begin(self) -> BlockJournal:
        self._journal = BlockJournal(self._events)
        self._kv_cache.set_journal(self._journal)
        return self._journal
