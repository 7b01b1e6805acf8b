"""The requests of one model version that are not over yet, by their clients' ids.

For: stop by request id, and a shutdown that has to say what it cuts. Does not know: how a request is served.
Invariants: a request is here from before it is queued until its last handle is gone; adding, removing and finding by id
are O(1); ids may repeat, and the empty id finds nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from llmbackend.core.requests.response_channel import ResponseChannel


class LiveRequests:
    """Any thread may use it."""

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
        """How many different ids are known."""
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
        """Blocks until none of these requests is left; others do not matter."""
        with self._left:
            self._waiting += 1
            self._left.wait_for(lambda: self._channels.isdisjoint(channels))
            self._waiting -= 1

    def all(self) -> list[ResponseChannel]:
        with self._lock:
            return list(self._channels)

    def with_instance(self, instance: object) -> list[ResponseChannel]:
        """Those that were given to that instance last."""
        return [channel for channel in self.all() if channel.instance is instance]

    def with_id(self, request_id: str) -> list[ResponseChannel]:
        with self._lock:
            return list(self._by_id.get(request_id, ()))
