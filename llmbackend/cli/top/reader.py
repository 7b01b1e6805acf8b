"""Reads a server's feed on its own thread, and connects again when the server goes away.

For: the command. Does not know: what events mean. Invariants: events reach the queue in order; a connection that ends
is told of by a Notice, and what is wrong for good (a refusal) by an ApiError, which is the last thing in the queue.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from ..api_client import ApiClient, ApiError

PATH: Final = "/v2/engine/events"
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 5.0
_MAX_QUEUED: Final = 1000
"""Then the reader waits, and the server drops events for this viewer."""


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: Any


@dataclass(frozen=True, slots=True)
class Notice:
    """What is wrong with the connection; "" = it is there."""

    text: str


class FeedReader:
    def __init__(self, client: ApiClient, models: Sequence[str], interval_ms: int) -> None:
        self._client = client
        query = [*(("model", model) for model in models), ("interval_ms", str(interval_ms))]
        self._path = f"{PATH}?{urlencode(query)}"
        self._queue: queue.Queue[Event | Notice | ApiError] = queue.Queue(_MAX_QUEUED)
        self._stop = threading.Event()
        self._had_snapshot = False
        self._thread = threading.Thread(target=self._run, name="feed-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The thread ends with its next event, or with the process."""
        self._stop.set()

    def read(self, timeout_s: float) -> list[Event | Notice]:
        """What has come, within the timeout. Raises ApiError when no more will come."""
        found: list[Event | Notice] = []
        try:
            item = self._queue.get(timeout=timeout_s)
            while True:
                if isinstance(item, ApiError):
                    raise item
                found.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return found

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._stop.is_set():
            try:
                self._follow()
                reason = "the server ended the connection"
                wait_s = _FIRST_WAIT_S
            except ApiError as error:
                if error.status in range(400, 500) or not self._had_snapshot:
                    self._queue.put(error)
                    return
                reason = str(error)
            self._queue.put(Notice(f"{reason}; connecting again"))
            self._stop.wait(wait_s)
            wait_s = min(wait_s * 2, _MAX_WAIT_S)

    def _follow(self) -> None:
        with self._client.events(self._path) as events:
            for event in events:
                if self._stop.is_set():
                    return
                if event.name == "snapshot":
                    self._had_snapshot = True
                    self._queue.put(Notice(""))
                self._queue.put(Event(event.name, event.json()))
