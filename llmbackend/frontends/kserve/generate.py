"""POST …/generate and …/generate_stream of any model: a flat JSON object in, one or a stream of server-sent events out.

Every key of a request becomes an input tensor, a parameter, or the request's id. The status is that of the first
response, which is awaited before the head is sent. Responses that are ready at the same time are sent in one write. A
client disconnect cancels the request. Source: Triton's generate extension (ExactMappingInput, ExactMappingOutput),
recorded from Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.errors import ErrorCode, TritonError, internal, invalid_argument, request_tag
from llmbackend.core.messages import InferenceRequest, InferenceResponse, ModelMetadata, TensorMetadata
from llmbackend.core.outputs import OutputLayout, Outputs
from llmbackend.core.requests.request_validation import MAX_PARAMETERS, check_count, check_id
from llmbackend.core.tensors import Tensor
from llmbackend.core.tracing.trace import RequestTrace

from ..http.direct_body import DirectBody
from ..http.errors import error_body
from ..http.event_stream import EventStream, pieces_of
from ..http.json_reader import as_object, as_string, dump, parse, parsing, repeated_keys
from ..http.request_body import read_body, release_body
from ..http.request_scope import HAS_FAILED, received, sampled, traced
from ..http.responses import JSON, PartsResponse
from ..http.routing import Endpoints, post
from ..inference import Inference
from ..inference_gate import InferenceGate, are_large
from ..journals.journal import Recording
from ..journals.resumable_streams import (
    ResumableStreams,
    begin_recording,
    is_resumable,
    last_event_id,
    open_stream,
    resume_stream,
)
from ..operations.probes import load_headers
from .http_types import GenerateRequest, GenerateResponse, model_name_of, model_of, model_paths
from .infer_codec import flatten, has_nan_or_inf, json_from_tensor, tensor_from_json
from .request_parameters import json_parameter

_NESTED: Final = "parameters"


def decode_request(body: bytes, model: ModelMetadata, version: int) -> InferenceRequest:
    """The request in `body`. Raises TritonError naming the invalid key."""
    document = parse(body)
    if not isinstance(document, dict):
        raise internal("attempt to get members for non-object")
    request_id = ""
    if "id" in document:
        with parsing("id"):
            request_id = as_string(document["id"])
        check_id(request_id)
    mapping = _Mapping(model, request_id)
    mapping.refuse_repeated(body)
    mapping.add_all(document)
    return InferenceRequest(
        model_name=model.name,
        model_version=version,
        id=request_id,
        inputs=tuple(mapping.tensors.values()),
        parameters=mapping.parameters,
    )


class _Mapping:
    """The tensors of a request, from keys that name inputs of the model, and its parameters, from all others."""

    def __init__(self, model: ModelMetadata, request_id: str) -> None:
        self._inputs = {tensor.name: tensor for tensor in model.inputs}
        self._tag = request_tag(request_id)
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, ParameterValue] = {}

    def refuse_repeated(self, body: bytes) -> None:
        """Raises TritonError INVALID_ARG if an input's name occurs twice in an object; slow only if it occurs twice at
        all."""
        if any(body.count(b'"%b"' % name.encode()) > 1 for name in self._inputs):
            for name in repeated_keys(body):
                if name in self._inputs:
                    raise self._already_exists(name)

    def add_all(self, document: Mapping[str, Any]) -> None:
        if _NESTED in document and _NESTED in self._inputs:
            raise invalid_argument("Keyword 'parameters' for nested schema also given as input tensor name")
        check_count("members", document, MAX_PARAMETERS, self._tag)
        for key, value in document.items():
            if key == _NESTED:
                self._add_nested(value)
            else:
                self._add(key, value)

    def _add_nested(self, value: Any) -> None:
        try:
            members = as_object(value)
        except TritonError as error:
            raise internal(f"Expected JSON object for keyword: '{_NESTED}': {error.message}") from None
        check_count("parameters", members, MAX_PARAMETERS, self._tag)
        try:
            for key, item in members.items():
                self._add(key, item)
        except TritonError as error:
            raise TritonError(f"Converting keyword: '{_NESTED}': {error.message}", error.code) from None

    def _add(self, key: str, value: Any) -> None:
        tensor = self._inputs.get(key)
        if tensor is None:
            self.parameters[key] = json_parameter(key, value)
        elif key in self.tensors:
            raise self._already_exists(key)
        else:
            self.tensors[key] = _tensor(tensor, value)

    def _already_exists(self, name: str) -> TritonError:
        return invalid_argument(f"{self._tag}input '{name}' already exists in request")


def _tensor(model_input: TensorMetadata, value: Any) -> Tensor:
    is_bytes = model_input.datatype == "BYTES"
    if is_bytes:  # as in Triton, a wrong type is reported before a wrong shape
        value = flatten(value)
        tensor_from_json(model_input.name, "BYTES", (len(value),), value)
    count = len(value) if isinstance(value, list) else 1
    return tensor_from_json(model_input.name, model_input.datatype, _shape(model_input, count), value)


def _shape(model_input: TensorMetadata, count: int) -> tuple[int, ...]:
    """A shape for `count` elements that matches the model's dims: all variable dims but the innermost are 1. Raises
    TritonError INVALID_ARG if there is none."""
    fixed = 1
    for dim in model_input.shape:
        fixed *= dim if dim >= 0 else 1
    free = [index for index, dim in enumerate(model_input.shape) if dim < 0]
    rest, left_over = divmod(count, fixed) if fixed else (0, count)
    if left_over or (not free and count != fixed):
        raise invalid_argument(f"The schema can not convert input '{model_input.name}' to tensor with proper shape")
    shape = [dim if dim >= 0 else 1 for dim in model_input.shape]
    if free:
        shape[free[-1]] = rest
    return tuple(shape)


def fields_of_response(response: InferenceResponse) -> dict[str, Any]:
    """All fields except the outputs."""
    fields: dict[str, Any] = {"model_name": response.model_name, "model_version": str(response.model_version)}
    if response.request_id:
        fields["id"] = response.request_id
    fields.update(response.parameters)
    return fields


def encode_response(response: InferenceResponse) -> bytes:
    """A flat object with sorted keys; a one-element tensor is a scalar, others are flat arrays. If JSON cannot
    represent an output, an error object: the status may have been sent already."""
    document = fields_of_response(response)
    try:
        for tensor in response.outputs:
            values = json_from_tensor(tensor)
            document[tensor.name] = values[0] if len(values) == 1 else values
    except TritonError as error:
        document = {"error": error.message}
    return dump(document, sort_keys=True, has_nan_or_inf=has_nan_or_inf(response.outputs))


class TextEvents:
    """Events of responses whose outputs are one string each. What all events of a stream share is encoded once."""

    def __init__(self, response: InferenceResponse, layout: OutputLayout) -> None:
        """response: any response with this layout"""
        self.layout = layout
        fixed = fields_of_response(response)
        indices = {name: index for index, name in enumerate(layout.names)}
        pieces, self._order = [b"data: {"], []
        for name in sorted({*fixed, *indices}):
            pieces[-1] += orjson.dumps(name) + b":"
            if name in indices:
                self._order.append(indices[name])
                pieces.append(b",")
            else:
                pieces[-1] += orjson.dumps(fixed[name]) + b","
        self._pieces = [*pieces[:-1], pieces[-1].removesuffix(b",") + b"}\n\n"]

    def event(self, values: Sequence[str]) -> bytes:
        parts = [self._pieces[0]]
        for index, piece in zip(self._order, self._pieces[1:], strict=True):
            parts += (orjson.dumps(values[index]), piece)
        return b"".join(parts)


def json_of_response(response: InferenceResponse) -> bytes:
    return error_body(response.error.message) if response.error is not None else encode_response(response)


class ResponseEvents:
    """An EventSource of one inference."""

    quiet_s: float | None = None

    def __init__(
        self,
        gate: InferenceGate,
        inference: Inference,
        first: InferenceResponse | None,
        recording: Recording | None,
        scope: Scope,
    ) -> None:
        """first: the already popped first response; None if the model sends none. recording: the stream's. scope: of
        the request; see HAS_FAILED"""
        self._scope = scope
        self._recording = recording
        if recording is not None and first is not None:
            recording.delta(0, first.delta)
        self._gate = gate
        self._inference = inference
        self._held = first
        """Popped but not written yet."""
        self._error: Exception | None = None
        self._texts: TextEvents | None = None
        """Writes events with the layout of the latest response."""
        self.is_over = False
        self.needs_task = True

    def listen(self, listener: Callable[[], None]) -> None:
        self._inference.listener = lambda inferences: listener()

    def ready(self) -> bytes:
        if self.needs_task or self.is_over:
            return b""
        inference = self._inference
        parts: list[bytes] = []
        try:
            while inference.has_responses:
                response = inference.pop()[0]
                if response is None:
                    continue
                if self._recording is not None:
                    self._recording.delta(0, response.delta)
                if are_large(response.outputs):
                    self._held, self.needs_task = response, True
                    return b"".join(parts)
                parts.append(self._event(response))
            self.is_over = inference.is_over
        except Exception as error:
            self._error, self.needs_task = error, True
        return b"".join(parts)

    async def awaited(self) -> bytes:
        """Raises what encoding the response raised."""
        self.needs_task = False
        if self._error is not None:
            raise self._error
        held, self._held = self._held, None
        if held is None:
            self.is_over = self._inference.is_over
            return b""
        json = await self._gate.encode(held.outputs, json_of_response, held)
        self.is_over = self._inference.is_over
        return b"data: %b\n\n" % json

    def _event(self, response: InferenceResponse) -> bytes:
        if response.error is not None:
            self._scope[HAS_FAILED] = True
        outputs = response.outputs
        if type(outputs) is not Outputs or not outputs.layout.is_text or response.parameters:
            return b"data: %b\n\n" % json_of_response(response)
        texts = self._texts
        if texts is None or texts.layout is not outputs.layout:
            texts = self._texts = TextEvents(response, outputs.layout)
        try:
            return texts.event(outputs.values)
        except TypeError:  # bytes, which need not be UTF-8
            return b"data: %b\n\n" % json_of_response(response)

    def ping(self) -> bytes:
        return b""


EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
_NOT_ONE_RESPONSE: Final = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)


class GenerateEndpoints(Endpoints):
    """The generate endpoints.

    As in Triton, /generate answers 200 with an error body unless the model sends exactly one response, and 400 if the
    first response is an error. Unlike Triton, by design: UNAVAILABLE becomes 503 with Retry-After, as for a full queue.
    """

    error_types = ("text/plain", "text/event-stream")

    def __init__(self, gate: InferenceGate, max_body_bytes: int, streams: ResumableStreams) -> None:
        self._gate = gate
        self._streams = streams
        self._max_body_bytes = max_body_bytes

    @post(*model_paths("/generate"), body=GenerateRequest, answer=GenerateResponse)
    async def generate(self, request: Request) -> Response:
        """One request, one response, as flat JSON"""
        model = self._model(request)
        trace = sampled(self._gate.server, model.name, request)
        return await traced(trace, self._generate(request, model, trace))

    @post(
        *model_paths("/generate_stream"),
        body=GenerateRequest,
        response_class=Response,
        streams="One event per response: `data: <GenerateResponse>`.",
    )
    async def generate_stream(self, request: Request) -> Response:
        """One request, a stream of responses"""
        if last_event_id(request):
            return await resume_stream(self._streams, request, read_body(request, self._max_body_bytes))
        model = self._model(request)
        trace = sampled(self._gate.server, model.name, request)
        return await traced(trace, self._generate_stream(request, model, trace))

    async def _generate(self, request: Request, model: ModelMetadata, trace: RequestTrace | None) -> Response:
        inference = await self._submit(request, model, trace)
        try:
            responses = await inference.collect(at_most=2)
        finally:
            inference.close()
        body = (
            await self._gate.encode(responses[0].outputs, json_of_response, responses[0])
            if len(responses) == 1
            else error_body(_NOT_ONE_RESPONSE)
        )
        status = _status(responses[0] if responses else None)
        return PartsResponse([body], self._headers(request, JSON), status, has_length=False)

    async def _generate_stream(self, request: Request, model: ModelMetadata, trace: RequestTrace | None) -> Response:
        inference = await self._submit(request, model, trace, is_stream=True)
        recording = Recording.of(request)
        try:
            first = await _first_response(inference)
            headers = self._headers(request, EVENT_STREAM)
            events = ResponseEvents(self._gate, inference, first, recording, request.scope)
            status = _status(first)
            if status == 200 and is_resumable(request):
                inference.outlive_client()
                return await open_stream(self._streams, request, pieces_of(events), inference.close, headers)
        except BaseException:
            inference.close()
            raise
        return EventStream(pieces_of(events, DirectBody.of(request.scope)), headers, status, inference.close)

    def _headers(self, request: Request, content_type: str) -> dict[str, str]:
        load = load_headers(self._gate.server, request, model_name_of(request))
        return {"content-type": content_type} | load

    def _model(self, request: Request) -> ModelMetadata:
        """The model in the path. Raises TritonError for a request that can be refused before its body is read."""
        name, version = model_of(request)
        if request.headers.get("content-encoding", "identity") not in ("", "identity"):
            raise invalid_argument("Unsupported content-encoding, only 'identity' is supported.")
        metadata = self._gate.server.model_metadata(name, version)
        self._gate.check_capacity()
        return metadata

    async def _submit(
        self, request: Request, model: ModelMetadata, trace: RequestTrace | None, *, is_stream: bool = False
    ) -> Inference:
        body = await read_body(request, self._max_body_bytes)
        received(trace)
        version = model_of(request)[1]
        message = await self._gate.decode_in_process(len(body), decode_request, body, model, version)
        recording = begin_recording(self._streams, request, body) if is_stream else None
        backlog = None
        if recording is not None:
            message = replace(message, resume=recording.resume(0))
            backlog = self._gate.new_backlog(recording.num_known)
        inference = await self._gate.send(message, backlog, trace)
        release_body(request)
        inference.cancel_on_disconnect(request)
        return inference


def _status(first: InferenceResponse | None) -> int:
    if first is None or first.error is None:
        return 200
    return 503 if first.error.code is ErrorCode.UNAVAILABLE else 400


async def _first_response(inference: Inference) -> InferenceResponse | None:
    while (item := await inference.next()) is not None:
        if item[0] is not None:
            return item[0]
    return None
