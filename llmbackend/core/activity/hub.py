"""Viewers of the server's activity, and the queue of events that they have not yet read.

Invariants: reporting never blocks, whatever the viewers do; unread events are bounded in bytes and the oldest are
dropped first; instances are told which kinds of events are watched, and events of other kinds are dropped.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from ..errors import unavailable
from .messages import KIND_OF, Activity, EventKind, InstanceDescription, LogActivity, to_json

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES: Final = 16 << 20
"""Limit of all events together. A step of 64 rows takes about 1.7 kB."""
MAX_VIEWERS: Final = 32
MAX_VIEWERS_OF_A_KEY: Final = 4
NOTHING: Final[frozenset[EventKind]] = frozenset()
_ENTRY_BYTES: Final = 200
"""What an entry takes besides its event."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where an event comes from. instance: "" = a model version; model: "" = the server."""

    model: str = ""
    version: str = ""
    instance: str = ""


class WatchedInstance(Protocol):
    """An instance, as the hub sees it."""

    @property
    def source(self) -> Source: ...
    def watch(self, kinds: frozenset[EventKind]) -> None:
        """Sets the kinds to report from now on. Called under a lock of the hub, on any thread: it must not block."""

    def describe(self) -> InstanceDescription:
        """Thread-safe."""


@dataclass(slots=True)
class Entry:
    """An event: its type, the event as JSON, without its source, and its number, from 1."""

    source: Source
    event: type[Activity | LogActivity]
    data: bytes
    sequence: int = 0


class Reporter:
    """Reports the events of one source. Thread-safe; costs one comparison while nobody is viewing."""

    __slots__ = ("_hub", "source")

    def __init__(self, hub: ActivityHub, source: Source) -> None:
        self._hub = hub
        self.source = source

    @property
    def kinds(self) -> frozenset[EventKind]:
        return self._hub.kinds

    def report(self, activity: Activity) -> None:
        self._hub.report(self.source, activity)


class Viewer:
    """Reads the events reported since it was opened. For one thread at a time."""

    def __init__(self, hub: ActivityHub, kinds: frozenset[EventKind], key_name: str | None, wake: Callable[[], None]):
        """key_name: the only API key whose requests the viewer may see; None = all
        wake: called once per `sleep`, on any thread, when events are available
        """
        self.kinds = kinds
        self.key_name = key_name
        self.wake = wake
        self._hub = hub
        self._read_to = hub.last_sequence

    @property
    def position(self) -> str:
        """The id of the last event read, unique across servers."""
        return f"{self._hub.epoch}-{self._read_to}"

    @property
    def is_over(self) -> bool:
        """Whether the server has stopped."""
        return self._hub.is_closed

    def read(self) -> tuple[list[Entry], int]:
        """Returns all events since the last call, oldest first, and how many were dropped before them."""
        entries, dropped = self._hub.entries_since(self._read_to)
        self._read_to += len(entries) + dropped
        return entries, dropped

    def skip(self) -> None:
        """Marks all events as read."""
        self._read_to = self._hub.last_sequence

    def sleep(self) -> None:
        """Asks for one call of `wake` as soon as there are unread events."""
        self._hub.wake_for(self, self._read_to)

    def close(self) -> None:
        self._hub.remove(self)


class ActivityHub:
    """Thread-safe. `_viewers_lock` is taken before `_log_lock`, and never while reporting. `_log_lock` is reentrant:
    while it is held, a garbage collection may call a finalizer whose log line is reported."""

    def __init__(self) -> None:
        self.epoch = f"{int(time.time()):x}{secrets.token_hex(2)}"
        self.kinds = NOTHING
        """The watched kinds; read without a lock."""
        self.is_closed = False
        self.last_sequence = 0
        self._viewers_lock = threading.Lock()
        self._viewers: list[Viewer] = []
        self._instances: dict[WatchedInstance, None] = {}
        self._log_lock = threading.RLock()
        self._log: deque[Entry] = deque()
        self._log_bytes = 0
        self._asleep: list[Viewer] = []

    # --- viewers ------------------------------------------------------------------------------------------------------

    def open(self, kinds: frozenset[EventKind], key_name: str | None, wake: Callable[[], None]) -> Viewer:
        """Raises TritonError UNAVAILABLE when there are too many viewers, or the server has stopped."""
        with self._viewers_lock:
            if self.is_closed:
                raise unavailable("Server is stopping")
            of_key = [viewer for viewer in self._viewers if key_name is not None and viewer.key_name == key_name]
            for whose, count, most in (
                ("API key", len(of_key), MAX_VIEWERS_OF_A_KEY),
                ("server", len(self._viewers), MAX_VIEWERS),
            ):
                if count >= most:
                    raise unavailable(f"this {whose} already has {count} viewers of its events, the maximum")
            if key_name is not None:
                kinds |= {"requests"}  # needed to tell which requests are the key's
            viewer = Viewer(self, kinds, key_name, wake)
            self._viewers.append(viewer)
            self._watch(force="blocks" in kinds)
        return viewer

    def remove(self, viewer: Viewer) -> None:
        with self._viewers_lock:
            if viewer in self._viewers:
                self._viewers.remove(viewer)
                self._watch(force=False)
        with self._log_lock:
            if viewer in self._asleep:
                self._asleep.remove(viewer)
            if not self._viewers:
                self._log.clear()
                self._log_bytes = 0

    def close(self) -> None:
        """Ends all viewers, because the server has stopped."""
        with self._viewers_lock:
            self.is_closed = True
            viewers = list(self._viewers)
        for viewer in viewers:
            viewer.wake()

    def _watch(self, *, force: bool) -> None:
        """Tells all instances which kinds are watched, if that has changed. The caller holds `_viewers_lock`.
        force: tell them even if nothing has changed: a viewer of blocks starts with the state of all blocks"""
        kinds = NOTHING.union(*(viewer.kinds for viewer in self._viewers))
        if kinds == self.kinds and not force:
            return
        self.kinds = kinds
        for instance in self._instances:
            instance.watch(kinds)

    # --- instances ----------------------------------------------------------------------------------------------------

    def add_instance(self, instance: WatchedInstance) -> None:
        """Tells the instance the watched kinds, now and whenever they change. May be called repeatedly."""
        with self._viewers_lock:
            self._instances[instance] = None
            if self.kinds:
                instance.watch(self.kinds)

    def remove_instance(self, instance: WatchedInstance) -> None:
        with self._viewers_lock:
            self._instances.pop(instance, None)

    def describe(self) -> list[tuple[Source, InstanceDescription]]:
        """Takes time proportional to the number of requests in flight."""
        with self._viewers_lock:
            instances = list(self._instances)
        return [(instance.source, instance.describe()) for instance in instances]

    # --- events -------------------------------------------------------------------------------------------------------

    def report(self, source: Source, activity: Activity | LogActivity) -> None:
        if KIND_OF[type(activity)] not in self.kinds:
            return
        data = to_json(activity)
        entry = Entry(source, type(activity), data)
        with self._log_lock:
            self.last_sequence = entry.sequence = self.last_sequence + 1
            self._log.append(entry)
            self._log_bytes += len(data) + _ENTRY_BYTES
            while self._log_bytes > MAX_UNREAD_BYTES:
                self._log_bytes -= len(self._log.popleft().data) + _ENTRY_BYTES
            if not self._asleep:
                return
            asleep, self._asleep = self._asleep, []
        for viewer in asleep:
            viewer.wake()

    def entries_since(self, sequence: int) -> tuple[list[Entry], int]:
        """The events after `sequence` that are still stored, and how many have been dropped."""
        with self._log_lock:
            count = self.last_sequence - sequence
            num_stored = len(self._log)
            held = min(count, num_stored)
            return [self._log[index] for index in range(num_stored - held, num_stored)], count - held

    def wake_for(self, viewer: Viewer, sequence: int) -> None:
        with self._log_lock:
            if self.last_sequence == sequence and not self.is_closed:
                if viewer not in self._asleep:
                    self._asleep.append(viewer)
                return
        viewer.wake()
