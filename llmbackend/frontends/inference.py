"""One inference as a frontend holds it: the way to submit, to receive and to cancel.

For: HTTP and gRPC handlers on the event loop. Does not know: formats. Invariant: whoever submits an inference ends
it with `close`, which cancels it unless its FINAL response has been taken; so no way out of a handler leaves work
running unseen, and the number of open inferences is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from pickle import PickleBuffer
from typing import Any, Final, TypeVar

from starlette.requests import Request

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse, ResponseCallback
from llmbackend.core.requests.request_bounds import most_strings
from llmbackend.core.tensors import RawTensor, Tensor
from llmbackend.core.tracing.trace import RequestTrace

from .body_budget import BodyBudget
from .client_presence import PRESENCE, ClientPresence
from .doors.key_shares import KeyShares
from .doors.rate_limit import Account
from .doors.roles import Role, role_needed
from .doors.visit import VISIT
from .limits import InferenceLimits, LimitReachedError, PermissionDeniedError
from .mailbox import Backlog, Item, Mailbox, ResponseStream, are_large
from .request_body import read_content
from .work_threads import WorkThreads
from .workers.pool import WorkerPool

T = TypeVar("T")
LARGE_BODY_BYTES: Final = 256 << 10
"""A prompt of 50,000 words, or 40,000 token ids; parsed in 1 to 7 ms."""
MANY_STRINGS: Final = 4096
"""Decoded in about 1 ms."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Inference:
    """A submitted request: its responses one by one or as they come together, until FINAL."""

    def __init__(self, responses: ResponseStream, handle: InferenceHandle, on_close: Callable[[], None]) -> None:
        self._responses = responses
        self._handle = handle
        self._on_close = on_close
        self._presence: ClientPresence | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False
        responses.on_overflow = handle.cancel

    def cancel(self) -> None:
        """Asks the host to end the request; its FINAL response still comes."""
        if not self._responses.is_over:
            self._handle.cancel()

    def cancel_on_disconnect(self, request: Request) -> None:
        """From now until `close`, the end of the client's connection cancels. The body must have been read."""
        self._presence = request.scope.get(PRESENCE)
        if self._presence is not None:
            self._presence.when_lost(self.cancel)
        else:
            self._watcher = asyncio.create_task(self._watch(request.receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    def close(self) -> None:
        """Ends the watching, cancels what has not come to its end, drops what nobody will read. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._presence is not None:
            self._presence.forget(self.cancel)
        if self._watcher is not None:
            self._watcher.cancel()
        self.cancel()
        self._responses.close()
        self._on_close()

    def pop(self) -> Item:
        """A response that is here (`on_response` was called for it)."""
        return self._responses.pop()

    async def next(self) -> Item | None:
        """Waits for one response. None after FINAL."""
        return await self._responses.next()

    async def next_batch(self) -> list[Item]:
        """Waits for one response, then takes all that are there. Empty after FINAL."""
        first = await self._responses.next()
        return [] if first is None else [first, *self._responses.pop_all()]

    async def collect(self, at_most: int) -> list[InferenceResponse]:
        """The first `at_most` responses, once FINAL has come; the rest is dropped as it comes."""
        responses: list[InferenceResponse] = []
        while (item := await self._responses.next()) is not None:
            if item[0] is not None and len(responses) < at_most:
                responses.append(item[0])
        return responses


class InferenceGate:
    """Submits requests to the host. Owns the mailbox of the event loop it is used on, and counts open inferences.

    Frontends on one loop share one gate, and so its limit.
    """

    def __init__(self, server: InferenceServer, limits: InferenceLimits | None = None) -> None:
        self.server = server
        self._limits = limits or InferenceLimits()
        self._mailbox: Mailbox | None = None
        self._open = 0
        self._shares = KeyShares()
        self.bodies = BodyBudget(self._limits.max_body_memory_bytes)
        self._large_body = asyncio.Lock()
        self._threads = WorkThreads(2, "large-requests")
        self._workers = WorkerPool()

    def close(self) -> None:
        """When no request will come any more: ends the threads and processes."""
        self._threads.close()
        self._workers.close()

    @property
    def open_inferences(self) -> int:
        return self._open

    def new_backlog(self) -> Backlog:
        """For a client that reads several requests through one stream."""
        return Backlog(self._limits.max_stream_buffer_bytes)

    def check_room(self, count: int = 1) -> None:
        """Raises LimitReachedError when `count` more inferences would be too many for the server, or for one key."""
        most = self._limits.max_concurrent_requests
        if self._open + count > most:
            raise LimitReachedError(f"the server is at its limit of {most} concurrent requests")
        visit = VISIT.get()
        if visit is not None:
            self._shares.check(visit.account, count, most - self._open - count)

    def admit(self, count: int) -> None:
        """For a body with `count` prompts, each of which becomes an inference: all or none. Raises LimitReachedError
        when there is no room for them, or the key has not as many prompts left in this minute."""
        self.check_room(count)
        visit = VISIT.get()
        refusal = None if visit is None else visit.pay(count)
        if refusal is not None:
            raise LimitReachedError(refusal.message, refusal.retry_after, refusal.kind)

    async def parsed(self, size_bytes: int, decode: Callable[..., T], body: bytes, *arguments: Any) -> T:
        """`decode(body, *arguments)`; in a worker process where `size_bytes` of the body are to be parsed and that is
        much (see WorkerPool for what may be passed), so that no parser holds the interpreter's lock for long.

        Raises what `decode` raises, TritonError UNAVAILABLE when the process can not be had or ends over the body.
        """
        if size_bytes <= LARGE_BODY_BYTES:
            return decode(body, *arguments)
        return await self._workers.run(decode, PickleBuffer(body), *arguments)

    async def printed(
        self, as_json: Sequence[Tensor], encode: Callable[..., T], response: InferenceResponse, *arguments: Any
    ) -> T:
        """`encode(response, *arguments)`, which makes JSON of the outputs `as_json` and copies the others; in a worker
        process where much is to be printed, in a thread where much is to be copied."""
        if are_large(as_json):
            return await self._workers.run(encode, response, *arguments)
        if are_large(response.outputs):
            return await self._threads.run(encode, response, *arguments)
        return encode(response, *arguments)

    async def content(self, request: Request, max_bytes: int) -> bytes:
        """The body of `request`, unpacked; raises as `request_body.read_content`."""
        return await read_content(request, max_bytes, self._threads)

    async def decoded(self, body_bytes: int, decode: Callable[[], T]) -> T:
        """What `decode` makes of a body; of a large one in a thread, one body at a time.

        JSON parsers hold the interpreter's lock, so this bounds a stall to the longest single call (measured, 8 MiB:
        a list of numbers 190 ms instead of 600) and keeps the memory of several large bodies from adding up.
        """
        if body_bytes <= LARGE_BODY_BYTES:
            return decode()
        async with self._large_body:
            return await self._threads.run(decode)

    async def with_shared_inputs(self, request: InferenceRequest) -> InferenceRequest:
        """`request` with its inputs read from shared memory; large ones in a thread. Raises TritonError;
        PermissionDeniedError when the client's key may not use the regions, which belong to operators."""
        visit = VISIT.get()
        uses_regions = bool(request.shared_inputs or request.output_places)
        if uses_regions and visit is not None and visit.account.role is not Role.OPERATOR:
            raise PermissionDeniedError(role_needed(visit.account.name, visit.account.role))
        if not request.shared_inputs:
            return request
        read = partial(self.server.shared_memory.with_inputs, request)
        if sum(item.place.byte_size for item in request.shared_inputs) <= LARGE_BODY_BYTES:
            return read()
        return await self._threads.run(read)

    async def send(
        self, request: InferenceRequest, backlog: Backlog | None = None, trace: RequestTrace | None = None
    ) -> Inference:
        """`submit` for a request that was decoded with `nobody` as its callback; in a thread for one with many strings,
        each of which becomes an object, or with large raw tensors, which may have to be copied."""

        def complete(callback: ResponseCallback) -> InferenceRequest:
            request.response_callback, request.trace = callback, trace
            return request

        raw_bytes = sum(len(tensor.raw) for tensor in request.inputs if isinstance(tensor, RawTensor))
        if raw_bytes <= LARGE_BODY_BYTES and most_strings(request.inputs) <= MANY_STRINGS:
            return self.submit(complete, backlog)
        self.check_room()
        responses = ResponseStream(self._current_mailbox(), backlog or self.new_backlog())
        leave = self._enter()
        submitted = asyncio.ensure_future(self._threads.run(self.server.infer_async, complete(responses)))
        submitted.add_done_callback(partial(_leave_if_refused, leave))
        try:
            return Inference(responses, await asyncio.shield(submitted), leave)
        except asyncio.CancelledError:
            submitted.add_done_callback(partial(_close_unseen, responses, leave))
            raise

    def submit(
        self,
        build: Callable[[ResponseCallback], InferenceRequest],
        backlog: Backlog | None = None,
        on_response: Callable[[], None] | None = None,
    ) -> Inference:
        """Sends the request that `build` makes around the given callback.

        Raises TritonError when the host refuses it, LimitReachedError when there is no room.
        """
        self.check_room()
        responses = ResponseStream(self._current_mailbox(), backlog or self.new_backlog(), on_response)
        handle = self.server.infer_async(build(responses))
        return Inference(responses, handle, self._enter())

    def _enter(self) -> Callable[[], None]:
        """Counts one more open inference; what is returned takes it back."""
        self._open += 1
        visit = VISIT.get()
        if visit is None:
            return self._leave
        self._shares.enter(visit.account)
        return partial(self._leave, visit.account)

    def _leave(self, account: Account | None = None) -> None:
        self._open -= 1
        if account is not None:
            self._shares.leave(account)

    def _current_mailbox(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox


def _leave_if_refused(leave: Callable[[], None], submitted: asyncio.Future[InferenceHandle]) -> None:
    if submitted.cancelled() or submitted.exception() is not None:
        leave()


def _close_unseen(
    responses: ResponseStream, leave: Callable[[], None], submitted: asyncio.Future[InferenceHandle]
) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        Inference(responses, submitted.result(), leave).close()
