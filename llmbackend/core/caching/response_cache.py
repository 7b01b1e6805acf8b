"""What a response cache is, what its keys and entries are made of, and how one is made from `--cache-config`.

For: the caching scheduler (look up, insert) and the server (open, close). Does not know: requests' life, queues.
Invariants: two requests with one key ask the same of the same model, so that a hit answers exactly what was asked;
an entry is bytes of its own, so that it keeps no request alive and its size is known; what was answered to one tenant
is no answer to another.
Source: cache_manager.cc and cache_entry.cc of Triton's core. By design stricter than Triton's key (a 64-bit hash of the
model's name, version and inputs' names and bytes): 128 bits, and the tenant, datatypes, shapes and requested outputs
count, too; where the cache belongs to one server, so does the load of the model, so that a reloaded one answers itself.
As in Triton, request parameters do not count.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.tensors import Tensor, from_wire, to_wire, wire_view

log = logging.getLogger(__name__)

Settings = Mapping[str, str]


class ResponseCache(Protocol):
    """Any thread. `is_remote`: it is another process, which other servers may use and which must be waited for."""

    is_remote: bool

    def run_lookup(self, task: Callable[[], None]) -> None:
        """Runs a task that looks up: at once, or, where that means waiting for a network, on a thread of the cache's
        own, since callers must not wait."""

    def run_insert(self, task: Callable[[], None]) -> None:
        """The same for a task that inserts; it may be dropped when too many wait."""

    def lookup(self, key: bytes) -> bytes | None:
        """The entry, None when there is none or it can not be had (then that is logged)."""

    def insert(self, key: bytes, entry: bytes) -> None:
        """Raises TritonError ALREADY_EXISTS when there is one, INTERNAL when it can not be stored."""

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
    """The keys of one model version. `load_id` tells its loads apart, empty where they shall share their entries."""

    def __init__(self, model: str, version: int, load_id: bytes) -> None:
        self._of_model = hashlib.blake2b(repr((model, version, load_id)).encode(), digest_size=16)

    def of(self, request: InferRequest) -> bytes:
        """What differs is told apart by a head, which has the length of each tensor; the tensors' bytes follow."""
        tensors = sorted(request.inputs.items())
        views = [wire_view(tensor) for _, tensor in tensors]
        about = [
            (name, each.datatype, each.shape, len(view)) for (name, each), view in zip(tensors, views, strict=True)
        ]
        head = repr((request.tenant.cache_name, request.requested_outputs, about)).encode()
        digest = self._of_model.copy()
        digest.update(b"%d:" % len(head))
        digest.update(head)
        for view in views:
            digest.update(view)
        return digest.digest()


def pack(response: InferenceResponse) -> bytes:
    outputs = [_Output(each.name, each.datatype, each.shape, to_wire(each)) for each in response.outputs]
    return _encoder.encode(_Entry(outputs, dict(response.parameters)))


def unpack(entry: bytes) -> tuple[Iterable[Tensor], Mapping[str, ParameterValue]]:
    """Outputs and parameters. Raises ValueError or TritonError for bytes that are no entry."""
    found = _decoder.decode(entry)
    return [from_wire(each.name, each.datatype, each.shape, each.raw) for each in found.outputs], found.parameters


def create_cache(config: Mapping[str, Settings]) -> ResponseCache | None:
    """The cache that `--cache-config` asks for: name → settings. None when it asks for none.

    Raises TritonError with the texts of Triton and its caches.
    """
    if not config:
        return None
    if len(config) > 1:
        raise invalid_argument("found multiple cache configurations, but only a single cache is currently supported")
    ((name, settings),) = config.items()
    if name == "local":
        from .local_cache import LocalCache

        return LocalCache.create(settings)
    if name == "redis":
        from .redis_cache import RedisCache

        return RedisCache.create(settings)
    raise invalid_argument(f"unable to find cache '{name}'. This server has 'local' and 'redis'")
