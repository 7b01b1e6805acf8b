"""The server's one response cache, from its start to its end.

For: HostServices. Does not know: models, requests. Invariant: `current` is None before `open`, after `close`, and on a
server that was not told to cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from .local_cache import LocalCache, LocalCacheMetrics
from .response_cache import ResponseCache, Settings, create_cache


class CacheSlot:
    def __init__(self, config: Mapping[str, Settings], registry: CollectorRegistry) -> None:
        self._config = config
        self._registry = registry
        self.current: ResponseCache | None = None

    def open(self) -> None:
        """Raises TritonError when the cache can not be made."""
        self.current = create_cache(self._config)
        if isinstance(self.current, LocalCache):
            self._registry.register(LocalCacheMetrics(self.current))

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None
