"""The response cache: the interface, and its implementations in memory and in Redis."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from .backend_api import MetricFamily, ParameterValue
from .c_api.library import CompiledCache
from .errors import ErrorCode, TritonError, internal, invalid_argument, unsupported
from .messages import InferenceResponse
from .requests.queued_request import QueuedRequest
from .tensors import Tensor, from_wire, to_wire, wire_view

if TYPE_CHECKING:
    from redis import Redis


log = logging.getLogger(__name__)

ENTRY_OVERHEAD_BYTES = 256
"""Memory of an entry besides its bytes: its key, the objects and the slot in the dictionary."""


class CacheStore(Protocol):
    """Where responses are kept. Thread-safe.

    is_shared: whether other servers may use it; then loads of a model share entries, too
    """

    is_shared: bool

    def lookup(self, key: bytes) -> bytes | None:
        """The entry; None if there is none, or if it cannot be read (which is logged)."""

    def insert(self, key: bytes, entry: bytes) -> None:
        """Raises TritonError ALREADY_EXISTS for an existing key, INTERNAL if the entry cannot be stored."""

    def close(self) -> None: ...


class ResponseCache(CacheStore, Protocol):
    """A store, and the threads on which it is used.

    takes_time: whether it is used on threads of its own, because its calls may take long
    """

    takes_time: bool

    def run_lookup(self, task: Callable[[], None], skip: Callable[[], None]) -> None:
        """Calls `task`, which does a lookup, at once or on a thread of the cache. If `task` has waited too long for a
        thread, calls `skip` instead."""

    def run_insert(self, task: Callable[[], None]) -> None:
        """Calls `task`, an insertion, at once or on a thread of the cache. Drops it if too many are waiting."""


class LocalCache:
    """The response cache in memory: bounded in bytes, evicts the least recently used entries."""

    is_shared = False
    takes_time = False

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
        """Raises TritonError INVALID_ARG unless the only setting is a valid `size`."""
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

    def run_lookup(self, task: Callable[[], None], skip: Callable[[], None]) -> None:
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

    def gauges(self) -> dict[str, float]:
        """The values of Triton's metrics, by name."""
        with self._lock:
            return {
                "nv_cache_util": self._used_bytes / self._size_bytes,
                "nv_cache_num_entries": len(self._entries),
                "nv_cache_num_hits": self._hits,
                "nv_cache_num_misses": self._lookups - self._hits,
                "nv_cache_num_lookups": self._lookups,
                "nv_cache_num_evictions": self._evictions,
                "nv_cache_lookup_duration": self._lookup_ns // 1000,
                "nv_cache_insertion_duration": self._insertion_ns // 1000,
            }

    def _evict(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._used_bytes -= len(entry) + ENTRY_OVERHEAD_BYTES
        self._evictions += 1


_GAUGES = {
    "nv_cache_util": "Cache utilization [0.0 - 1.0]",
    "nv_cache_num_entries": "Number of responses stored in response cache",
    "nv_cache_num_hits": "Number of cache hits in response cache",
    "nv_cache_num_misses": "Number of cache misses in response cache",
    "nv_cache_num_lookups": "Number of cache lookups in response cache",
    "nv_cache_num_evictions": "Number of cache evictions in response cache",
    "nv_cache_lookup_duration": "Total cache lookup duration (hit and miss), in microseconds",
    "nv_cache_insertion_duration": "Total cache insertion duration, in microseconds",
}


class LocalCacheMetrics:
    """A collector that reads the values at each scrape; Triton copies them once a second."""

    def __init__(self, cache: LocalCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        for name, value in self._cache.gauges().items():
            metric = Metric(name, _GAUGES[name], "gauge")
            metric.add_sample(name, {}, value)
            yield metric


MAX_WAITING_INSERTS = 256
COMPILED_CACHE_THREADS = 4
COMPILED_CACHE_WAIT_TIMEOUT_S = 0.1


class ThreadedCache:
    """A response cache whose store may take long to answer, for example over a network, so that threads use it.

    A lookup that waits longer than `wait_timeout_s` for a thread is skipped: if the store is slow, a request is delayed
    by at most one other lookup rather than by all earlier ones. The store must answer some time: requests wait for
    calls that never return. At most MAX_WAITING_INSERTS insertions wait.
    """

    takes_time = True

    def __init__(
        self, store: CacheStore, threads: int, wait_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._wait_timeout_s = wait_timeout_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="response-cache")
        started = threading.Barrier(threads)
        try:
            for _ in range(threads):  # now, so that no request fails because a thread cannot be started
                self._threads.submit(started.wait)
        except RuntimeError as error:
            started.abort()  # otherwise the threads that were started would wait for ever, also at exit
            self._threads.shutdown()
            raise internal(f"the response cache cannot start its {threads} threads: {error}") from None
        self._insert_slots = threading.BoundedSemaphore(MAX_WAITING_INSERTS)
        self.is_shared = store.is_shared
        self.lookup = store.lookup
        self.insert = store.insert

    def run_lookup(self, task: Callable[[], None], skip: Callable[[], None]) -> None:
        self._threads.submit(self._run_in_time, task, skip, self._clock() + self._wait_timeout_s)

    def _run_in_time(self, task: Callable[[], None], skip: Callable[[], None], deadline_s: float) -> None:
        (task if self._clock() <= deadline_s else skip)()

    def run_insert(self, task: Callable[[], None]) -> None:
        if not self._insert_slots.acquire(blocking=False):
            log.warning("response cache: %d insertions are waiting; dropping one more", MAX_WAITING_INSERTS)
            return
        future = self._threads.submit(task)
        future.add_done_callback(lambda _: self._insert_slots.release())

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._store.close()


KEY_PREFIX = b"llmbackend:response:"
_TLS_OPTIONS = {"cert": "ssl_certfile", "key": "ssl_keyfile", "cacert": "ssl_ca_certs", "cacert_dir": "ssl_ca_path"}
_NUMBERS = {"port": 0, "db": 0, "connect_timeout": 1000, "socket_timeout": 1000, "pool_size": 1, "wait_timeout": 100}
"""Settings that are numbers, and their defaults. Timeouts in ms, 0 = none."""
_SETTINGS = frozenset({"host", "user", "password", *_NUMBERS, *_TLS_OPTIONS})


class RedisCache:
    """The response cache in Redis.

    Deliberate difference from Triton: connect_timeout and socket_timeout default to 1 second. The lifetime and memory
    of entries are configured in Redis (`maxmemory`, `maxmemory-policy allkeys-lru`).
    """

    is_shared = True

    def __init__(self, client: Redis) -> None:
        self._client = client

    @classmethod
    def create(cls, settings: Mapping[str, str]) -> ThreadedCache:
        """Connects; each connection has a thread. Raises TritonError: INVALID_ARG for invalid settings, UNSUPPORTED
        without the `redis` package, INTERNAL if Redis does not answer."""
        if "host" not in settings or "port" not in settings:
            raise invalid_argument(
                "Failed to initialize RedisCache, didn't specify address. Must at a minimum specify 'host' and 'port' "
                "in the configuration - e.g. tritonserver --cache-config redis,host=redis --cache-config "
                "redis,port=6379 --model-repository=/models ..."
            )
        if unknown := sorted(settings.keys() - _SETTINGS):
            raise invalid_argument(f"Failed to initialize RedisCache: unknown setting '{unknown[0]}'")
        numbers = {name: _number(name, settings.get(name, default)) for name, default in _NUMBERS.items()}
        client = _client(settings, numbers)
        try:
            client.ping()
        except Exception as error:
            client.connection_pool.disconnect()
            raise internal(f"Failed to initialize RedisCache: {error}") from None
        return ThreadedCache(cls(client), max(numbers["pool_size"], 1), numbers["wait_timeout"] / 1000 or math.inf)

    def lookup(self, key: bytes) -> bytes | None:
        try:
            entry: Any = self._client.get(KEY_PREFIX + key)
        except Exception as error:
            log.error("Failed to retrieve key: %s. %s", key.hex(), error)
            return None
        return entry if isinstance(entry, bytes) else None

    def insert(self, key: bytes, entry: bytes) -> None:
        try:
            is_new = self._client.set(KEY_PREFIX + key, entry, nx=True)
        except Exception as error:
            raise internal(f"Failed to insert key: {key.hex()}. {error}") from None
        if not is_new:
            raise TritonError(f"key '{key.hex()}' already exists", ErrorCode.ALREADY_EXISTS)

    def close(self) -> None:
        self._client.connection_pool.disconnect()


def _number(name: str, text: str | int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise invalid_argument(f"Failed to initialize RedisCache: '{name}' must be a whole number, got '{text}'")
    return number


def _client(settings: Mapping[str, str], numbers: dict[str, int]) -> Redis:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise unsupported(
            "Failed to initialize RedisCache: the package 'redis' is not installed (pip install 'llmbackend[redis]')"
        ) from None
    tls = {option: settings[name] for name, option in _TLS_OPTIONS.items() if name in settings}
    pool = redis.BlockingConnectionPool(
        connection_class=redis.SSLConnection if tls else redis.Connection,
        max_connections=max(numbers["pool_size"], 1),
        host=settings["host"],
        port=numbers["port"],
        db=numbers["db"],
        username=settings.get("user"),
        password=settings.get("password"),
        socket_connect_timeout=numbers["connect_timeout"] / 1000 or None,
        socket_timeout=numbers["socket_timeout"] / 1000 or None,
        retry=Retry(NoBackoff(), 1),  # reopens a connection closed by Redis
        **tls,
    )
    return redis.Redis(connection_pool=pool)


class _Output(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes


class _Entry(msgspec.Struct, array_like=True):
    outputs: list[_Output]
    parameters: dict[str, ParameterValue]


_ENTRY_FORMAT = 1
"""One more with each change of an entry: servers of two releases may share a Redis."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Entry)


class CacheKeys:
    """The keys of one model version. load_id: identifies the load; empty if loads share entries.

    Deliberately stricter than Triton's key, a 64-bit hash of model name, version, and the inputs' names and bytes: this
    one has 128 bits and also covers the tenant's cache name, datatypes, shapes and requested outputs. In a cache that
    is not shared it covers the load too, so that a reloaded model never gets older responses. As in Triton, request
    parameters are not part of the key.
    """

    def __init__(self, model: str, version: int, load_id: bytes) -> None:
        self._of_model = hashlib.blake2b(repr((_ENTRY_FORMAT, model, version, load_id)).encode(), digest_size=16)

    def of(self, request: QueuedRequest) -> bytes:
        """A hash of a header with each tensor's name, datatype, shape and size, followed by the tensors' bytes."""
        tensors = sorted(request.inputs.items())
        views = [wire_view(tensor) for _, tensor in tensors]
        described = [
            (name, each.datatype, each.shape, len(view)) for (name, each), view in zip(tensors, views, strict=True)
        ]
        header = repr((request.tenant.cache_name, request.requested_outputs, described)).encode()
        digest = self._of_model.copy()
        digest.update(b"%d:" % len(header))
        digest.update(header)
        for view in views:
            digest.update(view)
        return digest.digest()


def pack(response: InferenceResponse) -> bytes:
    outputs = [_Output(each.name, each.datatype, each.shape, to_wire(each)) for each in response.outputs]
    return _encoder.encode(_Entry(outputs, dict(response.parameters)))


def unpack(entry: bytes) -> tuple[Iterable[Tensor], Mapping[str, ParameterValue]]:
    """Returns outputs and parameters. Raises ValueError or TritonError for a malformed entry."""
    found = _decoder.decode(entry)
    return [from_wire(each.name, each.datatype, each.shape, each.raw) for each in found.outputs], found.parameters


def create_cache(
    config: Mapping[str, Mapping[str, str]],
    directory: Path | None,
    metric_family: Callable[..., MetricFamily],
) -> ResponseCache | None:
    """Creates the cache of `--cache-config`. Raises TritonError with the texts of Triton and its caches.

    config: settings by cache name; {} = no cache, None is returned
    directory: where caches in shared libraries are
    metric_family: creates their metrics"""
    if not config:
        return None
    if len(config) > 1:
        raise invalid_argument("found multiple cache configurations, but only a single cache is currently supported")
    ((name, settings),) = config.items()
    library = directory / name / f"libtritoncache_{name}.so" if directory is not None else None
    if library is not None and Path(name).name == name and library.is_file():
        cache = CompiledCache(library, settings, metric_family)
        return ThreadedCache(cache, COMPILED_CACHE_THREADS, COMPILED_CACHE_WAIT_TIMEOUT_S)
    if name == "local":
        return LocalCache.create(settings)
    if name == "redis":
        return RedisCache.create(settings)
    raise invalid_argument(f"unable to find cache '{name}'. This server has 'local' and 'redis'")


class CacheSlot:
    """The server's cache, from `open` to `close`. `current` is None outside that time and without --cache-config."""

    def __init__(
        self,
        config: Mapping[str, Mapping[str, str]],
        directory: Path | None,
        registry: CollectorRegistry,
        metric_family: Callable[..., MetricFamily],
    ) -> None:
        self._config = config
        self._directory = directory
        self._metric_family = metric_family
        self._registry = registry
        self.current: ResponseCache | None = None

    def open(self) -> None:
        """Raises TritonError if the cache cannot be created."""
        self.current = create_cache(self._config, self._directory, self._metric_family)
        if isinstance(self.current, LocalCache):
            self._registry.register(LocalCacheMetrics(self.current))

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None
