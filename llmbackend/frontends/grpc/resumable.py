"""ModelStreamInfer requests that a client can resume: parameter `resumable`, later `resume_from`.

Independent of connections. Invariants: those of ResumableStreams; responses are those of any other request, plus the
parameters `stream_id` and `event_number`; the model never sees the request's two parameters.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.backend_api import ParameterValue, is_final
from llmbackend.core.errors import TritonError, invalid_argument
from llmbackend.core.messages import InferenceRequest

from ..inference import Inference
from ..inference_gate import InferenceGate
from ..journals.journal import EventsGoneError, Recording, StreamRecord
from ..journals.resumable_streams import MAX_STREAM_BYTES, ResumableStream, ResumableStreams
from ..journals.stream_copies import MAX_REQUEST_BYTES
from ..kserve.request_parameters import RequestOptions, options_from_proto
from .codec import decode_request, outcome_message, stream_message
from .messages import LargeRequest, OpenRequest, opened, parse_or_keep

RESUMABLE: Final = "resumable"
RESUME_FROM: Final = "resume_from"
STREAM_ID: Final = "stream_id"
EVENT_NUMBER: Final = "event_number"
PATH: Final = "grpc:"
"""Prefix of a stream's path, followed by the model's name."""
_TYPES: Final = {RESUMABLE: "bool_param", RESUME_FROM: "string_param"}
_encode_parameters = msgspec.msgpack.encode
_decode_parameters = msgspec.msgpack.Decoder(dict[str, ParameterValue]).decode


@dataclass(frozen=True, slots=True)
class Resuming:
    """The two parameters of a request."""

    is_requested: bool = False
    place: str = ""
    """Id of the last response that the client received; "": a new request."""


_NOT_ASKED: Final = Resuming()


def take_resuming(message: Any) -> Resuming:
    """Removes the two parameters from a ModelInferRequest. Raises TritonError INVALID_ARG for a wrong type."""
    parameters = message.parameters
    if not parameters or not (RESUMABLE in parameters or RESUME_FROM in parameters):
        return _NOT_ASKED
    values: dict[str, Any] = {}
    for name, expected in _TYPES.items():
        if name not in parameters:
            continue
        kind = parameters[name].WhichOneof("parameter_choice")
        if kind != expected:
            raise invalid_argument(f"parameter '{name}' is a {kind}, expected {expected}")
        values[name] = getattr(parameters[name], expected)
        del parameters[name]
    return Resuming(values.get(RESUMABLE, False), values.get(RESUME_FROM, ""))


async def resumed(streams: ResumableStreams, model_name: str, place: str) -> tuple[ResumableStream, int]:
    """Raises TritonError as ResumableStreams.find."""
    return await streams.find(PATH + model_name, place, f"parameter '{RESUME_FROM}'")


async def begin(
    gate: InferenceGate, streams: ResumableStreams, request: OpenRequest, options: RequestOptions, data: bytes
) -> ResumableStream:
    """Sends the request, and opens the stream of its responses. data: the received message. Raises TritonError."""
    recording = None
    if streams.copies is not None and len(data) <= MAX_REQUEST_BYTES:
        recording = Recording()
        recording.request, recording.identity = data, _encode_parameters(dict(options.parameters))
    return await _opened(gate, streams, request, options, recording)


async def regenerate(gate: InferenceGate, streams: ResumableStreams, record: StreamRecord) -> None:
    """A Regenerate of StreamCopies."""
    request = await opened(parse_or_keep(record.head.request), gate)
    take_resuming(request.message)
    options = replace(
        options_from_proto(request.message.parameters), parameters=_decode_parameters(record.head.identity)
    )
    await _opened(gate, streams, request, options, Recording(record))


def data_of(request: Any) -> bytes:
    return bytes(request.data if isinstance(request, LargeRequest) else request.SerializeToString())


async def _opened(
    gate: InferenceGate,
    streams: ResumableStreams,
    request: OpenRequest,
    options: RequestOptions,
    recording: Recording | None,
) -> ResumableStream:
    given = await gate.with_shared_inputs(decode_request(request, options))
    if recording is not None:
        given = replace(given, resume=recording.resume(0))
    backlog = gate.new_backlog(0 if recording is None else recording.num_known)
    inference = await gate.send(given, backlog)
    try:
        messages = _messages(inference, given, options.empty_final_response, recording)
        return await streams.open(PATH + given.model_name, messages, inference.close, recording=recording)
    except BaseException:
        inference.close()
        raise


async def _messages(
    inference: Inference, given: InferenceRequest, empty_final: bool, recording: Recording | None
) -> AsyncGenerator[Sequence[bytes], None]:
    """The messages of the responses to `given`."""
    while (item := await inference.next()) is not None:
        response, flags = item
        final = is_final(flags)
        if response is None:
            if final and empty_final:
                yield [outcome_message(given.model_name, given.id, final)]
            continue
        if recording is not None:
            recording.delta(0, response.delta)
        try:
            if response.error is not None:
                raise response.error
            message = stream_message(response, final, given.shared_outputs)
        except TritonError as error:
            message = outcome_message(given.model_name, given.id, final, error.message)
        yield [message]


def numbered(message: bytes, key: str, number: int) -> bytes:
    """The message with its stream id and event number: protobuf parsers merge bytes appended to a message into it."""
    place = pb.ModelStreamInferResponse()
    parameters = place.infer_response.parameters
    parameters[STREAM_ID].string_param, parameters[EVENT_NUMBER].int64_param = key, number
    return message + bytes(place.SerializeToString())


class JournalAnswer:
    """The messages of one resumable stream, from one position on, for one gRPC stream. It stays in the stream's queue
    while it has messages, and reads more from the journal once they are written."""

    has_ended = False
    """Constant: this answer leaves the queue by itself."""

    def __init__(
        self,
        stream: ResumableStream,
        after: int,
        enqueue: Callable[[JournalAnswer], None],
        leave: Callable[[JournalAnswer], None],
    ) -> None:
        self._stream = stream
        self._enqueue = enqueue
        self._leave = leave
        self._messages: deque[bytes] = deque()
        """References to the journal's messages; each is copied only when it is written, since many may wait."""
        self._number: int | None = None
        """The event number of the first one; None: they have none."""
        self._taken: asyncio.Future[None] | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read(after))

    @property
    def has_more(self) -> bool:
        """Whether it stays in the queue."""
        if not self._messages and self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
        return bool(self._messages)

    def take(self) -> bytes:
        message = self._messages.popleft()
        if self._number is None:
            return message
        self._number += 1
        return numbered(message, self._stream.key, self._number - 1)

    def end(self) -> None:
        """Never called, since has_ended is always False."""

    def close(self) -> None:
        """Stops reading."""
        self._reading.cancel()

    async def _read(self, after: int) -> None:
        reading = self._stream.journal.follow(after)
        try:
            async for events in reading:
                await self._write(events.parts, events.first)
        except EventsGoneError:
            text = f"the client reads too slowly: more than {MAX_STREAM_BYTES} bytes were waiting for it"
            await self._write([outcome_message(self._stream.head.path.removeprefix(PATH), "", True, text)])
        except TritonError as error:
            await self._write([outcome_message(self._stream.head.path.removeprefix(PATH), "", True, error.message)])
        finally:
            await reading.aclose()
        self._leave(self)

    async def _write(self, messages: Sequence[bytes], number: int | None = None) -> None:
        """Returns once all have been taken. number: of the first event"""
        if messages:
            self._number = number
            self._messages.extend(messages)
            self._taken = asyncio.get_running_loop().create_future()
            self._enqueue(self)
            await self._taken
