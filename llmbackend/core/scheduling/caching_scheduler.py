"""A scheduler behind the response cache: a cached response is sent without queueing the request.

Invariants: a request is answered either from the cache or by the scheduler, never by both; only a single, successful,
final response is cached; a cache failure can cost a hit but never a request. Source: CacheLookUp and DelegateResponse
in Triton's dynamic_batch_scheduler.cc; golden transcript 44.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from ..backend_api import ResponseFlag
from ..caching import CacheKeys, ResponseCache, pack, unpack
from ..errors import ErrorCode, TritonError, internal, request_tag
from ..messages import InferenceResponse, ResponseCallback
from ..metrics.model_metrics import FailureReason
from ..requests.queued_request import QueuedRequest
from ..requests.response_channel import ChannelOwner
from .scheduler import DelegatingScheduler, Scheduler

log = logging.getLogger(__name__)


class _Recording:
    """The responses of a request that missed the cache. only: the single response so far; None after more, or an
    error."""

    __slots__ = ("client", "key", "lookup_ns", "only", "responses")

    def __init__(self, client: ResponseCallback, key: bytes, lookup_ns: int) -> None:
        self.client = client
        self.key = key
        self.lookup_ns = lookup_ns
        self.responses = 0
        self.only: InferenceResponse | None = None

    def add(self, response: InferenceResponse) -> None:
        self.responses += 1
        self.only = response if self.responses == 1 and response.error is None else None


class CachingScheduler(DelegatingScheduler):
    def __init__(self, inner: Scheduler, cache: ResponseCache, model: ChannelOwner) -> None:
        super().__init__(inner)
        self._cache = cache
        self._keys = CacheKeys(model.name, model.version, load_id=b"" if cache.is_shared else os.urandom(16))
        self._lock = threading.Lock()
        self._waiting = 0
        self._statistics = model.statistics
        self._statistics.is_cached = True

    def __len__(self) -> int:
        return super().__len__() + self._waiting

    def enqueue(self, request: QueuedRequest) -> None:
        """Raises TritonError as the inner scheduler does; if the cache does lookups on its own threads, fails the
        request with that error instead. A request that continues after earlier responses is not looked up."""
        if request.resume is not None and request.resume.deltas:
            super().enqueue(request)
            return
        look_up, skip = partial(self._look_up, request), partial(super().enqueue, request)
        if self._cache.takes_time:
            self._count_waiting(1)
            look_up, skip = partial(self._run_later, look_up, request), partial(self._run_later, skip, request)
        self._cache.run_lookup(look_up, skip)

    def leaked_resources(self) -> Mapping[str, int]:
        return {**super().leaked_resources(), "requests that wait for the response cache": self._waiting}

    def _count_waiting(self, change: int) -> None:
        with self._lock:
            self._waiting += change

    def _run_later(self, step: Callable[[], None], request: QueuedRequest) -> None:
        """Called on a thread of the cache."""
        self._count_waiting(-1)
        try:
            step()
        except TritonError as error:
            request.fail(error, FailureReason.REJECTED)
        except Exception as error:
            log.exception("%sthe scheduler behind the response cache failed", request_tag(request.id))
            request.fail(internal(f"{type(error).__name__}: {error}"), FailureReason.OTHER)

    def _look_up(self, request: QueuedRequest) -> None:
        start_ns = time.monotonic_ns()
        key = self._keys.of(request)
        entry = self._cached(key, request)
        lookup_ns = time.monotonic_ns() - start_ns
        if entry is not None and self._send_cached(request, entry, lookup_ns):
            return
        request.channel.wrap_callback(lambda client: partial(self._on_response, _Recording(client, key, lookup_ns)))
        super().enqueue(request)

    def _cached(self, key: bytes, request: QueuedRequest) -> bytes | None:
        try:
            return self._cache.lookup(key)
        except Exception:
            log.exception("%sFailed to look up in the response cache", request_tag(request.id))
            return None

    def _send_cached(self, request: QueuedRequest, entry: bytes, lookup_ns: int) -> bool:
        """Sends the cached response. Returns False if the entry cannot be read."""
        try:
            outputs, parameters = unpack(entry)
        except (ValueError, TritonError) as error:
            log.error("%sunreadable entry in the response cache: %s", request_tag(request.id), error)
            return False
        start_ns = request.channel.start_ns
        request.channel.count_when_final(
            lambda final_ns: self._statistics.record_cache_hit(final_ns - start_ns, lookup_ns)
        )
        response = request.new_response()
        for output in outputs:
            response.add_output(output)
        for name, value in parameters.items():
            response.set_parameter(name, value)
        response.send(ResponseFlag.FINAL)
        request.release()
        return True

    def _on_response(self, recording: _Recording, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None:
            recording.add(response)
        if flags & ResponseFlag.FINAL and recording.only is not None:
            only, recording.only = recording.only, None
            self._cache.run_insert(partial(self._insert, recording.key, only, recording.lookup_ns))
        recording.client(response, flags)

    def _insert(self, key: bytes, response: InferenceResponse, lookup_ns: int) -> None:
        start_ns = time.monotonic_ns()
        log.debug("Inserting items at cache key: %s", key.hex())
        try:
            self._cache.insert(key, pack(response))
        except Exception as error:
            if isinstance(error, TritonError) and error.code is ErrorCode.ALREADY_EXISTS:
                return  # an identical request was answered in the meantime; as in Triton, not counted as a miss
            log.error("%sFailed to insert into response cache: %s", request_tag(response.request_id), error)
        self._statistics.record_cache_miss(lookup_ns, time.monotonic_ns() - start_ns)
