"""ModelStreamInfer: requests and their responses on one bidirectional stream.

Independent of how messages are encoded and written. Invariants: a request's error is a message, and ends the stream
only with the metadata `triton_grpc_error: true`; responses of one request stay in order; requests to models that are
not decoupled are answered or refused in order. Source: Triton's stream_infer_handler, recorded from Triton 2.51.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.backend_api import is_final
from llmbackend.core.errors import TritonError, cancelled, internal, invalid_argument
from llmbackend.core.tracing.trace import RequestTrace

from ..errors import MalformedError, log_bug
from ..inference import Inference
from ..inference_gate import InferenceGate
from ..journals.resumable_streams import ResumableStream, ResumableStreams
from ..kserve.request_parameters import HeaderForward, options_from_proto
from .codec import decode_request, model_version, outcome_message, refusal_message, stream_message
from .messages import LargeRequest, opened
from .resumable import RESUMABLE, RESUME_FROM, JournalAnswer, begin, data_of, resumed, take_resuming
from .rpc import INTERNAL_ERROR, Context, StreamWriter, grpc_status, sampled

_STRICT_ERRORS: Final = ("triton_grpc_error", "true")
MAX_WAITING_REFUSALS: Final = 64
"""Beyond it, no further request is read: refused requests do not count as open inferences."""
MAX_RESUMED: Final = 256
"""Answers to `resume_from` at a time, which do not count as open inferences. Beyond it, no further request is read."""


class _ClientGoneError(Exception):
    """A write failed, or gRPC has ended the call."""


class _InTurn:
    """Messages that may have to wait for the last message of an earlier request."""

    def __init__(self) -> None:
        self._must_wait = False
        self._follower: _InTurn | None = None

    def begin(self) -> None:
        """Enqueues what can be sent."""
        raise NotImplementedError

    def follow(self, before: _InTurn) -> None:
        """Orders these messages after those of `before`, which has not ended yet."""
        before._follower, self._must_wait = self, True

    def _release_follower(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower._must_wait = False
            follower.begin()


class _Refusal(_InTurn):
    """The answer to a request that did not reach any model."""

    has_more = False
    has_ended = True

    def __init__(self, message: bytes, enqueue: Callable[[_Refusal], None], leave: Callable[[_Refusal], None]) -> None:
        super().__init__()
        self._message = message
        self._enqueue = enqueue
        self._leave = leave

    def begin(self) -> None:
        if not self._must_wait:
            self._enqueue(self)

    def take(self) -> bytes:
        return self._message

    def end(self) -> None:
        self._leave(self)
        self._release_follower()

    def close(self) -> None:
        """Nothing to cancel."""


@dataclass(frozen=True, slots=True)
class _StreamRequest:
    """What the responses need to know about their request."""

    model_name: str
    id: str
    empty_final: bool
    in_shared_memory: Collection[str]
    strict_errors: bool
    trace: RequestTrace | None


class _Answer(_InTurn):
    """The responses of one request.

    It is in the stream's queue (`enqueue`) while responses wait, and leaves (`leave`) once its last message is written.
    """

    def __init__(
        self,
        inference: Inference,
        asked: _StreamRequest,
        enqueue: Callable[[_Answer], None],
        leave: Callable[[_Answer], None],
    ) -> None:
        super().__init__()
        self._inference = inference
        self._asked = asked
        self._enqueue = enqueue
        self._leave = leave
        self._has_begun = False
        self._is_waiting = False
        self.has_ended = False
        """Whether FINAL was taken."""

    def begin(self) -> None:
        self._inference.listener = self._on_responses
        self._on_responses()

    def _on_responses(self, _: object = None) -> None:
        if not (self._is_waiting or self._must_wait) and self._inference.has_responses:
            self._is_waiting = True
            self._enqueue(self)

    @property
    def has_more(self) -> bool:
        """Whether it stays in the queue."""
        self._is_waiting = self._inference.has_responses
        return self._is_waiting

    def take(self) -> bytes | None:
        """The next message; None: a final response without outputs, not requested. Raises TritonError if it ends the
        call."""
        response, flags = self._inference.pop()
        final, asked = is_final(flags), self._asked
        if not self._has_begun and asked.trace is not None:
            asked.trace.mark("GRPC_SEND_START")
        self._has_begun, self.has_ended = True, final
        if response is None:
            return outcome_message(asked.model_name, asked.id, final) if final and asked.empty_final else None
        if response.error is not None:
            return self._error(response.error, final)
        try:
            return stream_message(response, final, asked.in_shared_memory)
        except TritonError as error:
            return self._error(error, final)

    def _error(self, error: TritonError, final: bool) -> bytes:
        if self._asked.strict_errors:
            raise error
        return outcome_message(self._asked.model_name, self._asked.id, final, error.message)

    def end(self) -> None:
        """Called when the last message was written."""
        self._leave(self)
        self._release_follower()

    def close(self) -> None:
        """Cancels the request unless FINAL was taken."""
        self._inference.close()
        self._inference.listener = None  # it refers to this object
        if self._asked.trace is not None:
            self._asked.trace.mark("GRPC_SEND_END")
            self._asked.trace.close()


_Source = _Answer | _Refusal | JournalAnswer
"""Anything that produces messages for the stream."""


class StreamSession:
    """One call of ModelStreamInfer. Used on the event loop.

    Messages are written one at a time as responses arrive, without a task. While a message waits for the client's flow
    control, at most one backlog of responses is held for all requests of the stream, and a client that reads nothing
    for too long loses the stream. Any end other than the client's half-close cancels all requests.
    """

    def __init__(
        self,
        gate: InferenceGate,
        context: Context,
        write_timeout_s: float,
        forward: HeaderForward,
        streams: ResumableStreams | None,
    ) -> None:
        """streams: those of resumable requests; None if another process has them"""
        self._gate = gate
        self._streams = streams
        self._context = context
        self._forward = forward
        self._waiting_since_ns = time.monotonic_ns()
        self._backlog = gate.new_backlog()
        self._metadata = tuple(context.invocation_metadata() or ())
        self._strict_errors = _STRICT_ERRORS in [(key, value) for key, value in self._metadata]
        stalled = cancelled(f"the stream was cancelled: its client read nothing for {write_timeout_s:g} s")
        self._writer = StreamWriter(context, write_timeout_s, self._lost, lambda: self._fail(stalled))
        self._queue: deque[_Source] = deque()
        """Served round-robin."""
        self._continues_when_free = False
        self._is_ending = False
        """Whether nothing more will be written."""
        self._fail_in_group: Callable[[BaseException], object] | None = None
        self._answers: set[_Source] = set()
        self._all_left = asyncio.Event()
        self._all_left.set()
        self._last_ordered: _InTurn | None = None
        self._may_refuse = asyncio.Semaphore(MAX_WAITING_REFUSALS)
        self._may_resume = asyncio.Semaphore(MAX_RESUMED)

    async def run(self, requests: AsyncIterator[pb.ModelInferRequest]) -> None:
        """Serves until the client half-closes and every request has ended, or until the first error in strict mode."""
        failure: TritonError | None = None
        client_is_gone = False
        try:
            async with asyncio.TaskGroup() as group:
                self._fail_in_group = lambda error: group.create_task(_raise(error))
                async for request in requests:
                    await self._serve(request)
                    self._waiting_since_ns = time.monotonic_ns()
                await self._all_left.wait()
                await self._writer.idle()
        except* TritonError as errors:
            failure = _first(errors)
        except* _ClientGoneError:
            client_is_gone = True
        finally:
            self._close()
        if client_is_gone:  # a write failed before gRPC cancelled the call
            raise asyncio.CancelledError
        if failure is not None:
            await self._context.abort(grpc_status(failure), failure.message)

    def _close(self) -> None:
        self._is_ending, self._fail_in_group = True, None
        self._writer.close()
        for answer in self._answers:
            answer.close()
        self._answers.clear()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _serve(self, request: Any) -> None:
        trace: RequestTrace | None = None
        try:
            opened_request = await opened(request, self._gate)
        except MalformedError as error:
            await self._end_with(error)
        except TritonError as error:
            await self._refuse(_message_of(request), error)
            return
        arrived, request = request, opened_request.message
        is_back = is_decoupled = False
        try:
            resuming = take_resuming(request)
            if is_back := bool(resuming.place):
                await self._may_resume.acquire()
                found = await resumed(self._resumable, request.model_name, resuming.place)
                self._read(*found, self._resumed_left)
                return
            is_decoupled = self._gate.server.is_decoupled(request.model_name, model_version(request.model_version))
            options = options_from_proto(request.parameters)
            if self._forward:
                options = self._forward.into(options, self._metadata)
            if resuming.is_requested:
                stream = await begin(self._gate, self._resumable, opened_request, options, data_of(arrived))
                self._read(stream, -1, self._leave)
                return
            given = await self._gate.with_shared_inputs(decode_request(opened_request, options))
            trace = sampled(self._gate.server, request.model_name, self._context, self._waiting_since_ns)
            inference = await self._gate.send(given, self._backlog, trace=trace)
        except BaseException as error:
            if trace is not None:
                trace.close()
            if is_back:
                self._may_resume.release()
            if not isinstance(error, Exception):
                raise
            if is_back and self._strict_errors and isinstance(error, TritonError):
                await self._end_with(error)  # its status says whether to retry
            await self._refuse(request, error, in_order=not is_decoupled)
            return
        asked = _StreamRequest(
            request.model_name,
            request.id,
            empty_final=options.empty_final_response,
            in_shared_memory=given.shared_outputs,
            strict_errors=self._strict_errors,
            trace=trace,
        )
        self._begin(_Answer(inference, asked, self._enqueue, self._leave), in_order=not is_decoupled)

    @property
    def _resumable(self) -> ResumableStreams:
        """Raises TritonError INVALID_ARG if another process has these streams: a call's first request decides."""
        if self._streams is None:
            raise invalid_argument(
                f"parameters '{RESUMABLE}' and '{RESUME_FROM}' must be in the first request of a call"
            )
        return self._streams

    def _read(self, stream: ResumableStream, after: int, leave: Callable[[JournalAnswer], None]) -> None:
        """Sends the messages of a resumable stream."""
        self._answers.add(JournalAnswer(stream, after, self._enqueue, leave))
        self._all_left.clear()

    def _resumed_left(self, answer: JournalAnswer) -> None:
        self._may_resume.release()
        self._leave(answer)

    def _begin(self, answer: _Answer | _Refusal, in_order: bool) -> None:
        self._answers.add(answer)
        self._all_left.clear()
        if in_order:
            if self._last_ordered is not None:
                answer.follow(self._last_ordered)
            self._last_ordered = answer
        answer.begin()

    def _leave(self, answer: _Source) -> None:
        answer.close()
        self._answers.discard(answer)
        if self._last_ordered is answer:
            self._last_ordered = None
        if not self._answers:
            self._all_left.set()

    async def _refuse(self, request: Any, error: Exception, in_order: bool = True) -> None:
        """Answers a request that did not reach any model. in_order: it was not to a decoupled model"""
        if not isinstance(error, TritonError):
            log_bug(f"a request to model '{request.model_name}' cannot be submitted", error)
            error = internal(INTERNAL_ERROR)
        await self._may_refuse.acquire()
        message = refusal_message(request.id, error.message)
        self._begin(_Refusal(message, self._enqueue, self._refusal_left), in_order)

    def _refusal_left(self, refusal: _Refusal) -> None:
        self._may_refuse.release()
        self._leave(refusal)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _enqueue(self, source: _Source) -> None:
        self._queue.append(source)
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Writes messages while the client reads them."""
        while self._queue and not self._is_ending:
            if not self._writer.is_free:
                self._continue_when_free()
                return
            try:
                self._write_one(self._queue.popleft())
            except Exception as error:
                self._fail(error)

    def _write_one(self, source: _Source) -> None:
        message = source.take()
        if message is not None:
            self._writer.write(message)
        if source.has_more:
            self._queue.append(source)
        if source.has_ended:
            self._writer.when_free(source.end)

    def _continue_when_free(self) -> None:
        if not self._continues_when_free:
            self._continues_when_free = True
            self._writer.when_free(self._continue)

    def _continue(self) -> None:
        self._continues_when_free = False
        self._write_waiting()

    # --- end --------------------------------------------------------------------------------------------------------

    async def _end_with(self, error: TritonError) -> NoReturn:
        """Ends the call after the write in progress: gRPC cannot send a status while a message is being written."""
        self._is_ending = True
        await self._writer.idle()
        raise error

    def _lost(self, error: BaseException) -> None:
        """A write has failed."""
        gone = isinstance(error, grpc.aio.InternalError | grpc.aio.UsageError | asyncio.CancelledError)
        self._fail(_ClientGoneError() if gone else error)

    def _fail(self, error: BaseException) -> None:
        """Ends the call from outside of `run`; only the first error counts."""
        fail, self._fail_in_group = self._fail_in_group, None
        self._is_ending = True
        if fail is not None:
            fail(error)


async def _raise(error: BaseException) -> None:
    raise error


def _first(errors: BaseExceptionGroup[TritonError]) -> TritonError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TritonError)
    return error


def _message_of(request: Any) -> Any:
    """The message whose id a refusal repeats; an empty one if the request was not parsed."""
    return pb.ModelInferRequest() if isinstance(request, LargeRequest) else request
