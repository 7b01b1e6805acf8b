"""What is in flight in a model version: a count to wait on, and the requests themselves by their client's id.

For: draining a model or a server, cancelling by request id, naming the requests that a shutdown ends. Does not know:
how a request is served. Invariants: the count never falls below zero and does not rely on the garbage collector; a
request is in the registry from before it is queued until its last handle is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from llmbackend.core.requests.response_channel import ResponseChannel


class InFlight:
    """An explicit count of open handles. Any thread may enter, leave or wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._count = 0
        self._entered = 0

    @property
    def count(self) -> int:
        return self._count

    def enter(self) -> None:
        with self._changed:
            self._count += 1
            self._entered += 1

    def leave(self) -> int | None:
        """Closes one handle. If it was the last open one, returns how many were ever opened (see `is_idle_since`),
        otherwise None."""
        with self._changed:
            assert self._count > 0, "leave() without enter()"
            self._count -= 1
            if self._count:
                return None
            self._changed.notify_all()
            return self._entered

    def is_idle_since(self, entered: int) -> bool:
        """Whether no handle was opened since `leave` returned `entered`."""
        with self._changed:
            return self._count == 0 and self._entered == entered

    def wait_for_zero(self, timeout_s: float | None = None) -> bool:
        """Blocks until no handle is open; False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout_s)


class LiveRequests:
    """The requests that are not over yet. Adding, removing and finding by id are O(1). Client ids may repeat; the empty
    id finds nothing. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._waiting = 0
        self._channels: set[ResponseChannel] = set()
        self._by_id: dict[str, set[ResponseChannel]] = {}

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def id_count(self) -> int:
        """How many different ids are registered."""
        return len(self._by_id)

    def add(self, channel: ResponseChannel) -> None:
        with self._lock:
            self._channels.add(channel)
            if channel.request_id:
                self._by_id.setdefault(channel.request_id, set()).add(channel)

    def discard(self, channel: ResponseChannel) -> None:
        with self._lock:
            self._channels.discard(channel)
            same_id = self._by_id.get(channel.request_id)
            if same_id is not None:
                same_id.discard(channel)
                if not same_id:
                    del self._by_id[channel.request_id]
            if self._waiting:
                self._left.notify_all()

    def wait_until_gone(self, channels: Collection[ResponseChannel]) -> None:
        """Blocks until none of these requests is registered."""
        with self._left:
            self._waiting += 1
            self._left.wait_for(lambda: self._channels.isdisjoint(channels))
            self._waiting -= 1

    def all(self) -> list[ResponseChannel]:
        with self._lock:
            return list(self._channels)

    def with_instance(self, instance: object) -> list[ResponseChannel]:
        """Requests whose latest instance is `instance`."""
        return [channel for channel in self.all() if channel.instance is instance]

    def with_id(self, request_id: str) -> list[ResponseChannel]:
        with self._lock:
            return list(self._by_id.get(request_id, ()))
