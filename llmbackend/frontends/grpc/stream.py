"""ModelStreamInfer: many requests and their responses on one bidirectional stream.

For: the gRPC servicer. Does not know: how tensors are encoded. Invariants: a request's error is sent in band and does
not end the stream (unless the client asked for that with metadata `triton_grpc_error: true`); responses of one request
keep their order; requests to models that are not decoupled are answered in the order they came.
Source: Triton's stream_infer_handler, as recorded from Triton 2.51.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.backend_api import is_final
from llmbackend.core.errors import TritonError, cancelled, internal
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.tracing.trace import RequestTrace

from ..errors import MalformedError, log_bug
from ..inference import Inference, Item
from ..inference_gate import InferenceGate
from ..kserve.request_parameters import HeaderForward, options_from_proto
from .codec import decode_request, fill_response, model_version
from .messages import LargeRequest, opened
from .rpc import INTERNAL_ERROR, Context, grpc_status, sampled

FINAL_PARAMETER: Final = "triton_final_response"
_STRICT_ERRORS: Final = ("triton_grpc_error", "true")


@dataclass(frozen=True, slots=True)
class _StreamRequest:
    """One request of the stream, as far as its responses need it."""

    request: Any
    empty_final: bool
    in_shared_memory: Collection[str]
    trace: RequestTrace | None


class StreamSession:
    """One call of ModelStreamInfer. Used on the event loop alone.

    One message is written at a time; while it waits for the client's flow control, no more than a backlog of responses
    is held, over all requests of the stream, and a client that reads nothing for too long loses the stream. When the
    stream ends in any way but the client's half-close, all its requests are cancelled."""

    def __init__(self, gate: InferenceGate, context: Context, write_timeout_s: float, forward: HeaderForward) -> None:
        self._gate = gate
        self._context = context
        self._forward = forward
        self._waiting_since_ns = time.monotonic_ns()
        self._backlog = gate.new_backlog()
        self._stall = _WriteClock(write_timeout_s)
        self._metadata = tuple(context.invocation_metadata() or ())
        self._strict_errors = _STRICT_ERRORS in [(key, value) for key, value in self._metadata]
        self._write_lock = asyncio.Lock()
        self._last_ordered: asyncio.Task[None] | None = None

    async def run(self, requests: AsyncIterator[pb.ModelInferRequest]) -> None:
        """Serves until the client half-closes and every request has ended, or the first error in strict mode."""
        failure: TritonError | None = None
        client_is_gone = False
        try:
            async with asyncio.TaskGroup() as group:
                self._stall.on_stall = lambda: group.create_task(_fail(_stall_error(self._stall.timeout_s)))
                async for request in requests:
                    await self._serve(request, group)
                    self._waiting_since_ns = time.monotonic_ns()
        except* TritonError as errors:
            failure = _first(errors)
        except* grpc.aio.InternalError:
            client_is_gone = True
        finally:
            self._stall.close()
        if client_is_gone:  # a write failed before gRPC cancelled the call
            raise asyncio.CancelledError
        if failure is not None:
            await self._context.abort(grpc_status(failure), failure.message)

    async def _serve(self, request: Any, group: asyncio.TaskGroup) -> None:
        trace: RequestTrace | None = None
        try:
            opened_request = await opened(request, self._gate)
        except MalformedError as error:
            await self._end_with(error)
        except TritonError as error:
            await self._write(_refusal(_message_of(request), error))
            return
        request = opened_request.message
        try:
            options = options_from_proto(request.parameters)
            if self._forward:
                options = self._forward.into(options, self._metadata)
            version = model_version(request.model_version)
            is_decoupled = self._gate.server.is_decoupled(request.model_name, version)
            given = await self._gate.with_shared_inputs(decode_request(opened_request, options))
            trace = sampled(self._gate.server, request.model_name, self._context, self._waiting_since_ns)
            inference = await self._gate.send(given, self._backlog, trace=trace)
        except Exception as error:
            if trace is not None:
                trace.close()
            await self._write(_refusal(request, error))
            return
        before = None if is_decoupled else self._last_ordered
        asked = _StreamRequest(request, options.empty_final_response, given.shared_outputs, trace)
        relay = group.create_task(self._relay(inference, asked, before))
        relay.add_done_callback(lambda _: _end(inference, trace))  # also when it was cancelled before its first step
        if not is_decoupled:
            self._last_ordered = relay

    async def _relay(self, inference: Inference, asked: _StreamRequest, before: asyncio.Task[None] | None) -> None:
        """Writes the responses of one request, after those of the request `before` it."""
        if before is not None:
            await asyncio.wait([before])
        unsent = asked.trace
        while (item := await inference.next()) is not None:
            if unsent is not None:
                unsent.mark("GRPC_SEND_START")
                unsent = None
            message = _safe_message(asked, item)
            if message is not None:
                await self._write(message)
            if self._strict_errors and item[0] is not None and item[0].error is not None:
                await self._end_with(item[0].error)

    async def _end_with(self, error: TritonError) -> NoReturn:
        """Ends the call. Never releases the write lock: gRPC cannot send a status while a message is being written."""
        await self._write_lock.acquire()
        raise error

    async def _write(self, message: Any) -> None:
        if self._strict_errors and message.error_message and message.infer_response.model_name:
            return  # a model's error becomes the status of the call
        async with self._write_lock:
            self._stall.begin()
            await self._context.write(message)
            self._stall.end()


class _WriteClock:
    """Calls `on_stall` when one write takes longer than `timeout_s`. At most one timer, none without writes."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.on_stall: Callable[[], object] | None = None
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._began_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self.timeout_s, self._look)

    def end(self) -> None:
        self._began_s = None

    def _look(self) -> None:
        self._timer = None
        if self._began_s is None:
            return
        left_s = self._began_s + self.timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self.on_stall is not None:
            self.on_stall()

    def close(self) -> None:
        self.on_stall = None
        if self._timer is not None:
            self._timer.cancel()


def _stall_error(timeout_s: float) -> TritonError:
    return cancelled(f"the stream was cancelled: its client took nothing for {timeout_s:g} s")


def _end(inference: Inference, trace: RequestTrace | None) -> None:
    inference.close()
    if trace is not None:
        trace.mark("GRPC_SEND_END")
        trace.close()


async def _fail(error: TritonError) -> None:
    raise error


def _first(errors: BaseExceptionGroup[TritonError]) -> TritonError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TritonError)
    return error


def _message_of(request: Any) -> Any:
    """The message that a refusal may quote the id of; an empty one if the request was not parsed."""
    return pb.ModelInferRequest() if isinstance(request, LargeRequest) else request


def _refusal(request: Any, error: Exception) -> Any:
    """The response to a request that never reached a model, which the client recognises by its id alone."""
    if not isinstance(error, TritonError):
        log_bug(f"a request to model '{request.model_name}' cannot be submitted", error)
        error = internal(INTERNAL_ERROR)
    return pb.ModelStreamInferResponse(error_message=error.message, infer_response=pb.ModelInferResponse(id=request.id))


def _safe_message(asked: _StreamRequest, item: Item) -> Any | None:
    """As `_message`; a response that cannot be encoded becomes an error of its request and does not end the stream."""
    try:
        return _message(asked, item)
    except Exception as error:
        log_bug(f"a response of model '{asked.request.model_name}' cannot be encoded", error)
        return _message(asked, (_not_encodable(asked.request), item[1]))


def _not_encodable(request: Any) -> InferenceResponse:
    return InferenceResponse(request.model_name, 0, request.id, error=internal(INTERNAL_ERROR))


def _message(asked: _StreamRequest, item: Item) -> Any | None:
    """The message for one response; None for a final response without outputs that the client did not ask for."""
    response, flags = item
    final = is_final(flags)
    if response is None and not (final and asked.empty_final):
        return None
    message = pb.ModelStreamInferResponse()
    if response is None or response.error is not None:
        message.infer_response.model_name = asked.request.model_name
        message.infer_response.id = asked.request.id
    else:
        fill_response(message.infer_response, response, asked.in_shared_memory)
    if response is not None and response.error is not None:
        message.error_message = response.error.message
    message.infer_response.parameters[FINAL_PARAMETER].bool_param = final
    return message
