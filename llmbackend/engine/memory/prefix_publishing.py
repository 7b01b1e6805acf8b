"""Who is told which blocks the prefix cache has: hosts, while they ask, and subscribers of KV events.

For: the engine core. Does not know: steps, requests. Invariant: while nobody is told, there is no journal.
"""

from __future__ import annotations

from ..block_changes import BlockChanges
from ..kv_events_config import KVEventsConfig
from .block_journal import BlockJournal
from .kv_cache import KVCacheManager
from .kv_events import KVEvents


class PrefixPublishing:
    def __init__(self, kv_cache: KVCacheManager, events: KVEventsConfig | None) -> None:
        """Raises ValueError when an endpoint of the KV events cannot be bound."""
        self._kv_cache = kv_cache
        self._events = KVEvents(events, kv_cache.block_size) if events is not None and events.is_on else None
        self._journal: BlockJournal | None = None
        self._is_wanted = False
        if self._events is not None:
            self._begin()

    @property
    def has_work(self) -> bool:
        """Whether hosts have something to be told though nothing is computed."""
        return self._is_wanted and self._journal is not None and self._journal.has_changes

    def publish(self, is_wanted: bool) -> None:
        """Whether hosts are told from now on; first of all blocks, also where they were told before."""
        self._is_wanted = is_wanted
        if is_wanted:
            (self._journal or self._begin()).ask_for_snapshot()
        elif self._events is None:
            self._journal = None
            self._kv_cache.tell(None)

    def take(self) -> BlockChanges | None:
        """What hosts are to be told after a step; subscribers are told here."""
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
        self._kv_cache.tell(self._journal)
        return self._journal
