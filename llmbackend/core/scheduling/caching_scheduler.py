"""A scheduler with the response cache before it: what was answered before is answered at once and not queued.

For: models with `response_cache { enable: true }` on a server with a cache. Does not know: what a cache is made of, how
the scheduler behind it works. Invariants: a request is answered from the cache or goes on to the scheduler, never both;
only a single, successful, final response is kept; what fails in the cache costs a hit and no request.
Source: CacheLookUp and DelegateResponse in Triton's dynamic_batch_scheduler.cc; golden transcript 44.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from functools import partial

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.caching.response_cache import CacheKeys, ResponseCache, pack, unpack
from llmbackend.core.errors import ErrorCode, TritonError, internal, request_tag
from llmbackend.core.messages import InferenceResponse, ResponseCallback
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.requests.response_channel import ChannelOwner
from llmbackend.core.statistics import FailureReason

from .scheduler import Scheduler, SchedulerShell

log = logging.getLogger(__name__)


class _Recording:
    """The responses of a request that missed, on their way to the client. `only` is the one response so far, None when
    there was another, or an error."""

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


class CachingScheduler(SchedulerShell):
    def __init__(self, inner: Scheduler, cache: ResponseCache, model: ChannelOwner) -> None:
        super().__init__(inner)
        self._cache = cache
        self._keys = CacheKeys(model.name, model.version, load_id=b"" if cache.is_remote else os.urandom(16))
        self._lock = threading.Lock()
        self._waiting = 0
        self._statistics = model.statistics
        self._statistics.is_cached = True

    def __len__(self) -> int:
        return super().__len__() + self._waiting

    def enqueue(self, request: InferRequest) -> None:
        """Raises TritonError as the scheduler behind it, or, where the cache looks up on its own threads, fails the
        request with that error."""
        if self._cache.is_remote:
            self._count_waiting(1)
            self._cache.run_lookup(partial(self._look_up_later, request))
        else:
            self._cache.run_lookup(partial(self._look_up, request))

    def left_behind(self) -> Mapping[str, int]:
        return {**super().left_behind(), "requests that wait for the response cache": self._waiting}

    def _count_waiting(self, change: int) -> None:
        with self._lock:
            self._waiting += change

    def _look_up_later(self, request: InferRequest) -> None:
        self._count_waiting(-1)
        try:
            self._look_up(request)
        except TritonError as error:
            request.fail(error, FailureReason.REJECTED)
        except Exception as error:
            log.exception("%sthe scheduler behind the response cache failed", request_tag(request.id))
            request.fail(internal(f"{type(error).__name__}: {error}"), FailureReason.OTHER)

    def _look_up(self, request: InferRequest) -> None:
        start_ns = time.monotonic_ns()
        key = self._keys.of(request)
        entry = self._kept(key, request)
        lookup_ns = time.monotonic_ns() - start_ns
        if entry is not None and self._answer(request, entry, lookup_ns):
            return
        request.channel.intercept(lambda client: partial(self._arrived, _Recording(client, key, lookup_ns)))
        super().enqueue(request)

    def _kept(self, key: bytes, request: InferRequest) -> bytes | None:
        try:
            return self._cache.lookup(key)
        except Exception:
            log.exception("%sFailed to look up in the response cache", request_tag(request.id))
            return None

    def _answer(self, request: InferRequest, entry: bytes, lookup_ns: int) -> bool:
        """Answers from the cache; False for an entry that can not be read."""
        try:
            outputs, parameters = unpack(entry)
        except (ValueError, TritonError) as error:
            log.error("%sunreadable entry in the response cache: %s", request_tag(request.id), error)
            return False
        start_ns = request.channel.start_ns
        request.channel.when_final(lambda final_ns: self._statistics.record_cache_hit(final_ns - start_ns, lookup_ns))
        response = request.new_response()
        for output in outputs:
            response.add_output(output)
        for name, value in parameters.items():
            response.set_parameter(name, value)
        response.send(ResponseFlag.FINAL)
        request.release()
        return True

    def _arrived(self, recording: _Recording, response: InferenceResponse | None, flags: ResponseFlag) -> None:
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
                return  # an equal request was answered meanwhile; Triton counts no miss for this one
            log.error("%sFailed to insert into response cache: %s", request_tag(response.request_id), error)
        self._statistics.record_cache_miss(lookup_ns, time.monotonic_ns() - start_ns)
