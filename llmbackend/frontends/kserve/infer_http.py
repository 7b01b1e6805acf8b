"""POST …/infer: one request, one response.

Independent of the format of bodies (infer_codec.py). Invariants: a decoupled model is refused before the body is read;
a client disconnect cancels the request. Source: Triton's http_server; content types recorded from Triton 2.51: errors
about the body are application/json; earlier ones, and those of the model, are text/plain.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.errors import TritonError, invalid_argument, unsupported
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.tracing.trace import RequestTrace

from ..errors import BodyTooLargeError, UnpackedBodyTooLargeError, input_too_large
from ..http.errors import error_response
from ..http.request_body import ENCODINGS, IDENTITY, content_encoding
from ..http.request_scope import header, headers_as_sent, received, sampled, traced
from ..http.responses import JSON, PIECE_BYTES, TEXT, PartsResponse, compress, response_encoding
from ..http.routing import Endpoints, Json, post
from ..inference_gate import InferenceGate
from ..operations.probes import load_headers
from .http_types import InferRequest, InferResponse, model_of, model_paths
from .infer_codec import OutputForm, decode_request, encode_response, single_response
from .request_parameters import HeaderForward

_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_JSON_LENGTH: Final = b"inference-header-content-length"
_PARAMETERS: Final[list[Json]] = [
    {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "description": "Bytes of the JSON part of the body; raw tensors follow it. 0: the body is one raw tensor.",
        "schema": {"type": "integer", "minimum": 0},
    },
    {"name": "Content-Encoding", "in": "header", "schema": {"enum": [IDENTITY, *ENCODINGS]}},
    {"name": "Accept-Encoding", "in": "header", "schema": {"type": "string"}},
]
_BINARY: Final[Json] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


class InferEndpoint(Endpoints):
    def __init__(self, gate: InferenceGate, max_body_bytes: int, forward: HeaderForward) -> None:
        self._gate = gate
        self._max_body_bytes = max_body_bytes
        self._forward = forward

    @post(
        *model_paths("/infer"),
        body=InferRequest,
        body_content=_BINARY,
        parameters=_PARAMETERS,
        answer=InferResponse,
        responses={200: {"description": "Raw tensors follow the JSON where outputs are binary.", "content": _BINARY}},
    )
    async def infer(self, request: Request) -> Response:
        """One request, one response"""
        name, version = model_of(request)
        try:
            if self._gate.server.is_decoupled(name, version):
                raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")
            self._gate.check_capacity()
        except TritonError as error:
            return error_response(error, TEXT)
        if content_encoding(request) not in (*ENCODINGS, IDENTITY):
            accepted = {"accept-encoding": ", ".join(ENCODINGS)}
            return error_response(unsupported("Unsupported compression type"), TEXT, headers=accepted)
        trace = sampled(self._gate.server, name, request)
        return await traced(trace, self._answer(request, name, version, trace))

    async def _answer(self, request: Request, name: str, version: int, trace: RequestTrace | None) -> Response:
        try:
            content = await self._gate.read_content(request, self._max_body_bytes)
        except BodyTooLargeError as error:
            if header(request, _JSON_LENGTH) == "0" and not isinstance(error, UnpackedBodyTooLargeError):
                raise input_too_large("Raw input", error.size_bytes, self._max_body_bytes) from None
            raise
        received(trace)
        try:
            json_length = _json_length(request, len(content))
        except TritonError as error:
            return error_response(error, TEXT)
        message, form = await self._gate.decode_in_process(
            json_length, decode_request, content, json_length, name, version, self._max_body_bytes
        )
        return await self._run(request, message, form, trace)

    async def _run(
        self, request: Request, message: InferenceRequest, form: OutputForm, trace: RequestTrace | None
    ) -> Response:
        if self._forward:
            parameters = self._forward.added(message.parameters, headers_as_sent(request.scope))
            message = replace(message, parameters=parameters)
        message = await self._gate.with_shared_inputs(message)
        inference = await self._gate.send(message, trace=trace)
        inference.cancel_on_disconnect(request)
        try:
            response = single_response(await inference.collect(at_most=2))
        except TritonError as error:
            return error_response(error, TEXT)
        finally:
            inference.close()
        json, raws = await self._gate.encode(form.in_json(response), encode_response, response, form)
        return await _http_response(request, json, raws, load_headers(self._gate.server, request, message.model_name))


def _json_length(request: Request, body_bytes: int) -> int:
    """The length of the JSON part in bytes; as in Triton 2.51, 0 (one raw tensor) for a header that is not a number.
    Raises TritonError INVALID_ARG for a length beyond the body."""
    text = header(request, _JSON_LENGTH, str(body_bytes))
    length = int(text) if _INTEGER.fullmatch(text) else 0
    if not 0 <= length <= body_bytes:
        raise invalid_argument(f"inference header size should be in range (0, {body_bytes}), got: {text}")
    return length


async def _http_response(
    request: Request, json: bytes, raws: list[memoryview], added_headers: dict[str, str]
) -> Response:
    headers = {"content-type": "application/octet-stream" if raws else JSON} | added_headers
    if raws:
        headers[_JSON_LENGTH.decode()] = str(len(json))
    parts: list[bytes | memoryview] = [json, *raws]
    encoding = response_encoding(header(request, b"accept-encoding"))
    if encoding is not None:
        headers["content-encoding"] = encoding
        parts = [await compress(parts, encoding)]
    if sum(map(len, parts)) > PIECE_BYTES:
        return PartsResponse(parts, headers)
    return Response(b"".join(parts), headers=headers)
