"""What a response cache is, what its keys and entries are made of, and how one is made from `--cache-config`.

For: the caching scheduler (look up, insert) and the server (open, close). Does not know: requests' life, queues.
Invariants: two requests with one key ask the same of the same model, so that a hit answers exactly what was asked;
an entry is bytes of its own, so that it keeps no request alive and its size is known.
Source: cache_manager.cc and cache_entry.cc of Triton's core. By design stricter than Triton's key (a 64-bit hash of the
model's name, version and inputs' names and bytes): 128 bits, and datatypes, shapes and requested outputs count, too;
where the cache belongs to one server, so does the load of the model, so that a reloaded one answers itself. As in
Triton, request parameters do not count.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.errors import invalid_argument
from llmbackend.core.infer_request import InferRequest
from llmbackend.core.messages import InferenceResponse
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


def key_of(request: InferRequest, model: str, version: int, load_id: bytes) -> bytes:
    """`load_id` tells the loads of a model version apart, empty where they shall share their entries."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, [model.encode(), str(version).encode(), load_id])
    _add(digest, [name.encode() for name in request.requested_outputs])
    for name, tensor in sorted(request.inputs.items()):
        _add(digest, [name.encode(), tensor.datatype.encode(), repr(tensor.shape).encode(), wire_view(tensor)])
    return digest.digest()


def _add(digest: hashlib.blake2b, parts: Sequence[bytes | memoryview]) -> None:
    """Each part with its length before it, so that no two lists look alike."""
    for part in (str(len(parts)).encode(), *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


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
