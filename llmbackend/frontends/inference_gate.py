"""Where frontends submit inferences to the host: within the limits, and with large bodies off the event loop.

Independent of formats. Invariant: the open inferences of the server, and of each API key, never exceed their limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pickle import PickleBuffer
from typing import Any, Final, TypeVar

from starlette.requests import Request

from llmbackend.core.host_protocol import Host
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse, held_bytes
from llmbackend.core.outputs import Outputs
from llmbackend.core.requests.request_validation import string_count_bound
from llmbackend.core.tensors import RawTensor, Tensor
from llmbackend.core.tracing.trace import RequestTrace

from .access.permissions import Role, role_needed
from .access.rate_limit import Account, KeyShares
from .access.request_identity import REQUEST_IDENTITY, body_owner
from .errors import LimitReachedError, PermissionDeniedError
from .http.request_body import BodyBudget, read_content
from .inference import Backlog, Inference, Listener, Mailbox
from .limits import InferenceLimits
from .readiness_probes import ReadinessProbes
from .shared_counts import Counts, LocalCounts
from .workers import WorkerPool, WorkThreads

T = TypeVar("T")
LARGE_BODY_BYTES: Final = 256 << 10
"""About 50,000 words or 40,000 token ids; parsed in 1 to 7 ms."""
MANY_STRINGS: Final = 4096
"""Decoded in about 1 ms."""

_KNOWN_RESPONSE_BYTES: Final = 4096
_OPEN: Final = "inferences"
_LARGE_ELEMENTS: Final = 16 << 10
_LARGE_BYTES: Final = 256 << 10
"""Above either of these, converting tensors to JSON takes more than 2 to 5 ms."""


class InferenceGate:
    """Shared by the frontends of one event loop, with its limits, its mailbox and its readiness probes."""

    def __init__(self, server: Host, limits: InferenceLimits | None = None, counts: Counts | None = None) -> None:
        """counts: the number of open inferences, shared with the server's other processes"""
        self.server = server
        self.readiness = ReadinessProbes(server)
        self._limits = limits or InferenceLimits()
        self._mailbox: Mailbox | None = None
        self._counts = counts or LocalCounts()
        self._shares = KeyShares(self._counts)
        self.bodies = BodyBudget(self._limits.max_body_memory_bytes, body_owner)
        self._large_body = asyncio.Lock()
        self._threads = WorkThreads(2, "large-requests")
        self._workers = WorkerPool()

    def close(self) -> None:
        """Ends the threads and processes. To be called after the last request."""
        self._threads.close()
        self._workers.close()
        self.readiness.close()

    @property
    def open_inferences(self) -> int:
        return self._counts.held(_OPEN)

    def open_inferences_of(self, account: Account) -> int:
        return self._shares.held(account)

    def new_backlog(self, num_known_responses: int = 0) -> Backlog:
        """The backlog of one client. num_known_responses: responses that are sent again, all at once, when
        the client resumes"""
        return Backlog(self._limits.max_stream_buffer_bytes + num_known_responses * _KNOWN_RESPONSE_BYTES)

    def check_capacity(self, count: int = 1) -> None:
        """Raises LimitReachedError if `count` more inferences exceed the limit of the server or of the API key."""
        account = _account()
        self._check(count, self._counts.held(_OPEN), account, 0 if account is None else self._shares.held(account))

    def _check(self, count: int, num_open: int, account: Account | None, num_of_account: int) -> None:
        """num_open, num_of_account: open inferences, excluding these `count`"""
        most = self._limits.max_concurrent_requests
        if num_open + count > most:
            raise LimitReachedError(f"the server is at its limit of {most} concurrent requests")
        if account is not None:
            self._shares.check(account, count, num_of_account, most - num_open - count)

    def admit(self, count: int) -> None:
        """Admits all `count` generations of a body, or none. Raises LimitReachedError if they exceed a concurrency
        limit or the rate limit of the API key."""
        self.check_capacity(count)
        identity = REQUEST_IDENTITY.get()
        refusal = None if identity is None else identity.take(count)
        if refusal is not None:
            raise refusal.error()

    async def decode_in_process(self, size_bytes: int, decode: Callable[..., T], body: bytes, *arguments: Any) -> T:
        """`decode(body, *arguments)`, in a worker process if `size_bytes`, the part of the body to be parsed, exceeds
        LARGE_BODY_BYTES: no parser may hold the GIL for long. WorkerPool.run says what may be passed.

        Raises what `decode` raises, and TritonError UNAVAILABLE if no process can be started or it dies.
        """
        if size_bytes <= LARGE_BODY_BYTES:
            return decode(body, *arguments)
        return await self._workers.run(decode, PickleBuffer(body), *arguments)

    async def encode(
        self, as_json: Sequence[Tensor], encode: Callable[..., T], response: InferenceResponse, *arguments: Any
    ) -> T:
        """`encode(response, *arguments)`, which converts the outputs `as_json` to JSON and copies the others. Large
        JSON is created in a worker process, large copies in a thread."""
        if not are_large(response.outputs):
            return encode(response, *arguments)
        if are_large(as_json):
            return await self._workers.run(encode, response, *arguments)
        return await self._threads.run(encode, response, *arguments)

    async def read_content(self, request: Request, max_bytes: int) -> bytes:
        """The decompressed body of `request`. Raises as `request_body.read_content` does."""
        return await read_content(request, max_bytes, self._threads)

    async def decode_in_thread(self, body_bytes: int, decode: Callable[[], T]) -> T:
        """`decode()`; for a body above LARGE_BODY_BYTES in a thread, one body at a time.

        JSON parsers hold the GIL: a stall is at most the longest single call (measured for 8 MiB: a list of numbers
        takes 190 ms instead of 600), and the memory of several large bodies does not add up.
        """
        if body_bytes <= LARGE_BODY_BYTES:
            return decode()
        async with self._large_body:
            return await self._threads.run(decode)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Runs work that grows with a client's input."""
        return await self._threads.run(work)

    async def with_shared_inputs(self, request: InferenceRequest) -> InferenceRequest:
        """`request` with its inputs read from shared memory, large ones in a thread. Raises as
        SharedMemoryManager.with_inputs, and PermissionDeniedError unless the API key is an operator's."""
        identity = REQUEST_IDENTITY.get()
        uses_regions = bool(request.shared_inputs or request.shared_outputs)
        if uses_regions and identity is not None and identity.account.role is not Role.OPERATOR:
            raise PermissionDeniedError(role_needed(identity.account.name, identity.account.role))
        if not request.shared_inputs:
            return request
        read = partial(self.server.shared_memory.with_inputs, request)
        if sum(item.memory_range.byte_size for item in request.shared_inputs) <= LARGE_BODY_BYTES:
            return read()
        return await self._threads.run(read)

    async def send(
        self, request: InferenceRequest, backlog: Backlog | None = None, trace: RequestTrace | None = None
    ) -> Inference:
        """Like `submit`, but in a thread for a request with many strings, each of which becomes an object, or with
        large raw tensors, which may have to be copied."""
        if trace is not None:
            request = replace(request, trace=trace)
        raw_bytes = sum(len(tensor.raw) for tensor in request.inputs if isinstance(tensor, RawTensor))
        is_small = raw_bytes <= LARGE_BODY_BYTES and string_count_bound(request.inputs) <= MANY_STRINGS
        inference = self._new_inference(backlog)
        leave = self._enter()
        if is_small:
            try:
                return inference.accepted(await self.server.infer_accepted(request, inference), leave)
            except BaseException:
                leave()
                raise
        accepting = asyncio.ensure_future(self.server.infer_accepted(request, inference, self._threads.run))
        accepting.add_done_callback(partial(_leave_if_refused, leave))
        try:
            return inference.accepted(await asyncio.shield(accepting), leave)
        except asyncio.CancelledError:
            accepting.add_done_callback(partial(_close_accepted, inference, leave))
            raise

    def submit(
        self,
        request: InferenceRequest,
        backlog: Backlog | None = None,
        listener: Listener | None = None,
        count: int = 1,
    ) -> Inference:
        """Sends `request` to the host. count: the choices that it generates, each of which counts as one inference

        Raises TritonError if the host refuses it, LimitReachedError if a limit is reached. If the host is another
        process, its refusal arrives as the only response.
        """
        inference = self._new_inference(backlog, listener)
        leave = self._enter(count)
        try:
            return inference.accepted(self.server.infer_async(request, inference), leave)
        except BaseException:
            leave()
            raise

    def _enter(self, count: int = 1) -> Callable[[], None]:
        """Counts `count` more open inferences until the returned function is called. Raises as `check_capacity`.

        Counting precedes comparing, so that processes that enter at the same moment see each other's counts.
        """
        account = _account()
        num_open = self._counts.add(_OPEN, count)
        num_of_account = count if account is None else self._shares.enter(account, count)
        try:
            self._check(count, num_open - count, account, num_of_account - count)
        except LimitReachedError:
            self._leave(count, account)
            raise
        return partial(self._leave, count, account)

    def _leave(self, count: int, account: Account | None) -> None:
        self._counts.add(_OPEN, -count)
        if account is not None:
            self._shares.leave(account, count)

    def _new_inference(self, backlog: Backlog | None, listener: Listener | None = None) -> Inference:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return Inference(self._mailbox, backlog or self.new_backlog(), listener)


def _account() -> Account | None:
    """The account of the API key whose request is being handled."""
    identity = REQUEST_IDENTITY.get()
    return None if identity is None else identity.account


def _leave_if_refused(leave: Callable[[], None], accepting: asyncio.Future[InferenceHandle]) -> None:
    if accepting.cancelled() or accepting.exception() is not None:
        leave()


def _close_accepted(
    inference: Inference, leave: Callable[[], None], accepting: asyncio.Future[InferenceHandle]
) -> None:
    """Closes a request that was accepted after its client had left."""
    if not accepting.cancelled() and accepting.exception() is None:
        inference.accepted(accepting.result(), leave).close()


def are_large(tensors: Sequence[Tensor]) -> bool:
    """Whether converting them to JSON or copying them takes more than a few milliseconds."""
    if type(tensors) is Outputs and tensors.layout.is_text:  # one string each
        return tensors.num_bytes() > _LARGE_BYTES
    return sum(tensor.data.size for tensor in tensors) > _LARGE_ELEMENTS or held_bytes(tensors) > _LARGE_BYTES
