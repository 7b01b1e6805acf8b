"""The response cache in this process's memory: the least recently used entries are evicted when it is full.

For: `--cache-config=local,size=N`. Does not know: what an entry contains. Invariant: the entries, with the memory that
the process needs to keep each of them, never exceed `size` bytes. Source: Triton's local_cache (texts, metrics).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric

from llmbackend.core.errors import ErrorCode, TritonError, internal, invalid_argument

log = logging.getLogger(__name__)

ENTRY_OVERHEAD_BYTES = 256
"""Of one entry: its key, the bytes objects and the slot in the dictionary."""


class CacheCounts(NamedTuple):
    size_bytes: int
    used_bytes: int
    entries: int
    lookups: int
    hits: int
    evictions: int
    lookup_ns: int
    insertion_ns: int


class LocalCache:
    is_remote = False

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._lookups = self._hits = self._evictions = 0
        self._lookup_ns = self._insertion_ns = 0
        log.info("Response Cache is created with size %d", size_bytes)

    @classmethod
    def create(cls, settings: Mapping[str, str]) -> LocalCache:
        """Raises TritonError INVALID_ARG for settings without `size`, or with others."""
        if "size" not in settings:
            raise invalid_argument("Failed to initialize LocalCache: config didn't contain a valid 'size' field.")
        if unknown := sorted(settings.keys() - {"size"}):
            raise invalid_argument(f"Failed to initialize LocalCache: unknown setting '{unknown[0]}'")
        text = settings["size"]
        if not (text.isascii() and text.isdecimal()) or int(text) == 0:
            raise invalid_argument(
                f"Failed to initialize LocalCache: 'size' must be a positive number of bytes, got '{text[:80]}'"
            )
        return cls(int(text))

    def run_lookup(self, task: Callable[[], None]) -> None:
        task()

    def run_insert(self, task: Callable[[], None]) -> None:
        task()

    def lookup(self, key: bytes) -> bytes | None:
        start_ns = time.monotonic_ns()
        with self._lock:
            entry = self._entries.get(key)
            self._lookups += 1
            if entry is not None:
                self._hits += 1
                self._entries.move_to_end(key)
            self._lookup_ns += time.monotonic_ns() - start_ns
        return entry

    def insert(self, key: bytes, entry: bytes) -> None:
        start_ns = time.monotonic_ns()
        needed_bytes = len(entry) + ENTRY_OVERHEAD_BYTES
        with self._lock:
            if key in self._entries:
                raise TritonError(f"key '{key.hex()}' already exists", ErrorCode.ALREADY_EXISTS)
            if needed_bytes > self._size_bytes:
                raise internal(
                    f"Requested byte_size: {needed_bytes} is greater than total cache size: {self._size_bytes}"
                )
            while self._used_bytes + needed_bytes > self._size_bytes:
                self._evict()
            self._entries[key] = entry
            self._used_bytes += needed_bytes
            self._insertion_ns += time.monotonic_ns() - start_ns

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._used_bytes = 0

    def counts(self) -> CacheCounts:
        with self._lock:
            return CacheCounts(
                self._size_bytes,
                self._used_bytes,
                len(self._entries),
                self._lookups,
                self._hits,
                self._evictions,
                self._lookup_ns,
                self._insertion_ns,
            )

    def _evict(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._used_bytes -= len(entry) + ENTRY_OVERHEAD_BYTES
        self._evictions += 1


_GAUGES: tuple[tuple[str, str, Callable[[CacheCounts], float]], ...] = (
    ("nv_cache_util", "Cache utilization [0.0 - 1.0]", lambda counts: counts.used_bytes / counts.size_bytes),
    ("nv_cache_num_entries", "Number of responses stored in response cache", lambda counts: counts.entries),
    ("nv_cache_num_hits", "Number of cache hits in response cache", lambda counts: counts.hits),
    ("nv_cache_num_misses", "Number of cache misses in response cache", lambda counts: counts.lookups - counts.hits),
    ("nv_cache_num_lookups", "Number of cache lookups in response cache", lambda counts: counts.lookups),
    ("nv_cache_num_evictions", "Number of cache evictions in response cache", lambda counts: counts.evictions),
    (
        "nv_cache_lookup_duration",
        "Total cache lookup duration (hit and miss), in microseconds",
        lambda counts: counts.lookup_ns // 1000,
    ),
    (
        "nv_cache_insertion_duration",
        "Total cache insertion duration, in microseconds",
        lambda counts: counts.insertion_ns // 1000,
    ),
)


class LocalCacheMetrics:
    """A collector. By design read at each scrape, where Triton copies the values once a second."""

    def __init__(self, cache: LocalCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        counts = self._cache.counts()
        for name, description, read in _GAUGES:
            metric = Metric(name, description, "gauge")
            metric.add_sample(name, {}, read(counts))
            yield metric
