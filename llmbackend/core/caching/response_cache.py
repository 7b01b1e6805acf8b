"""The response cache: keys, entries, and the one cache of a server, made from `--cache-config`.

For: the caching scheduler (look up, insert) and the server (open, close). Does not know: a request's life, queues.
Invariants: requests with equal keys ask the same of the same model; an entry is bytes, so that it keeps no request
alive.
Source: cache_manager.cc and cache_entry.cc of Triton's core.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.requests.queued_request import QueuedRequest
from llmbackend.core.tensors import Tensor, from_wire, to_wire, wire_view

from .local_cache import LocalCache, LocalCacheMetrics

log = logging.getLogger(__name__)


class ResponseCache(Protocol):
    """Any thread."""

    is_remote: bool
    """Whether it is another process, which servers may share and whose answers take time."""

    def run_lookup(self, task: Callable[[], None]) -> None:
        """Runs a task that looks up: at once, or on a thread of the cache if the task waits for a network."""

    def run_insert(self, task: Callable[[], None]) -> None:
        """As `run_lookup`, for a task that inserts. It may be dropped when too many wait."""

    def lookup(self, key: bytes) -> bytes | None:
        """The entry; None when there is none, or when it cannot be read (which is logged)."""

    def insert(self, key: bytes, entry: bytes) -> None:
        """Raises TritonError ALREADY_EXISTS when there is one, INTERNAL when it cannot be stored."""

    def close(self) -> None: ...


class _Output(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes


class _Entry(msgspec.Struct, array_like=True):
    outputs: list[_Output]
    parameters: dict[str, ParameterValue]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Entry)


class CacheKeys:
    """The keys of one model version. load_id: differs between loads; empty where loads share entries.

    By design stricter than Triton's key (a 64-bit hash of model name, version and inputs' names and bytes): 128 bits,
    and tenant, datatypes, shapes and requested outputs count, too. In a cache of one server the load of the model
    counts as well, so that a reloaded model gets no older answers. Tenants with different cache names share no entry.
    As in Triton, request parameters do not count.
    """

    def __init__(self, model: str, version: int, load_id: bytes) -> None:
        self._of_model = hashlib.blake2b(repr((model, version, load_id)).encode(), digest_size=16)

    def of(self, request: QueuedRequest) -> bytes:
        """A hash over a header with each tensor's name, datatype, shape and size, then the tensors' bytes."""
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
    """Outputs and parameters. Raises ValueError or TritonError for bytes that are not an entry."""
    found = _decoder.decode(entry)
    return [from_wire(each.name, each.datatype, each.shape, each.raw) for each in found.outputs], found.parameters


def create_cache(config: Mapping[str, Mapping[str, str]]) -> ResponseCache | None:
    """The cache that `--cache-config` configures. config: cache name → settings; empty = None.

    Raises TritonError with the texts of Triton and its caches.
    """
    if not config:
        return None
    if len(config) > 1:
        raise invalid_argument("found multiple cache configurations, but only a single cache is currently supported")
    ((name, settings),) = config.items()
    if name == "local":
        return LocalCache.create(settings)
    if name == "redis":
        from .redis_cache import RedisCache

        return RedisCache.create(settings)
    raise invalid_argument(f"unable to find cache '{name}'. This server has 'local' and 'redis'")


class CacheSlot:
    """The server's cache from `open` to `close`; `current` is None outside of it and without --cache-config."""

    def __init__(self, config: Mapping[str, Mapping[str, str]], registry: CollectorRegistry) -> None:
        self._config = config
        self._registry = registry
        self.current: ResponseCache | None = None

    def open(self) -> None:
        """Raises TritonError when the cache cannot be made."""
        self.current = create_cache(self._config)
        if isinstance(self.current, LocalCache):
            self._registry.register(LocalCacheMetrics(self.current))

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None
