"""The response cache in a Redis server, which several servers may share.

For: `--cache-config=redis,host=…,port=…`. Does not know: what an entry contains. Invariants: only the cache's own
threads wait for the network; when Redis is slow or gone, lookups miss and insertions are dropped, with an error in the
log.
Source: Triton's redis_cache (settings, texts).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from llmbackend.core.errors import ErrorCode, TritonError, internal, invalid_argument, unsupported

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

KEY_PREFIX = b"llmbackend:response:"
MAX_WAITING_INSERTS = 256
_TLS_OPTIONS = {"cert": "ssl_certfile", "key": "ssl_keyfile", "cacert": "ssl_ca_certs", "cacert_dir": "ssl_ca_path"}
_NUMBERS = {"port": 0, "db": 0, "connect_timeout": 1000, "socket_timeout": 1000, "pool_size": 1, "wait_timeout": 100}
"""Settings that are numbers, and their defaults; timeouts in ms."""
_SETTINGS = frozenset({"host", "user", "password", *_NUMBERS, *_TLS_OPTIONS})


class RedisCache:
    """A ResponseCache. At most `MAX_WAITING_INSERTS` insertions wait.

    By design different from Triton: connect_timeout and
    socket_timeout are 1 second each unless set (0 = no timeout, Triton's default). The lifetime of entries and their
    memory are configured in Redis (`maxmemory`, `maxmemory-policy allkeys-lru`).
    """

    is_remote = True

    def __init__(self, client: Redis, threads: int) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="redis-cache")
        self._insert_room = threading.BoundedSemaphore(MAX_WAITING_INSERTS)

    @classmethod
    def create(cls, settings: Mapping[str, str]) -> RedisCache:
        """Connects. Raises TritonError: INVALID_ARG for settings, UNSUPPORTED without the `redis` package, INTERNAL
        when Redis does not answer."""
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
        return cls(client, max(numbers["pool_size"], 1))

    def run_lookup(self, task: Callable[[], None]) -> None:
        self._threads.submit(task)

    def run_insert(self, task: Callable[[], None]) -> None:
        if not self._insert_room.acquire(blocking=False):
            log.warning("RedisCache: %d insertions wait, one more is dropped", MAX_WAITING_INSERTS)
            return
        future = self._threads.submit(task)
        future.add_done_callback(lambda _: self._insert_room.release())

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
        self._threads.shutdown(cancel_futures=True)
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
        timeout=numbers["wait_timeout"] / 1000,
        host=settings["host"],
        port=numbers["port"],
        db=numbers["db"],
        username=settings.get("user"),
        password=settings.get("password"),
        socket_connect_timeout=numbers["connect_timeout"] / 1000 or None,
        socket_timeout=numbers["socket_timeout"] / 1000 or None,
        retry=Retry(NoBackoff(), 1),  # reopens a connection that Redis closed, once
        **tls,
    )
    return redis.Redis(connection_pool=pool)
