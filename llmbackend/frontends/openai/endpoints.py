"""What all endpoints of the OpenAI and Anthropic APIs share.

Invariants: bodies are read within the server's bounds, and large ones are parsed in a thread; errors have the form of
the API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from llmbackend.core.errors import TritonError, shown
from llmbackend.core.host_protocol import Host

from ..errors import BodyTooLargeError
from ..generation.models import ModelCatalog
from ..generation.sealed_reasoning import SealingKey, sealing_key
from ..http.errors import JsonObject, OpenAIError, OpenAIErrorBody
from ..http.json_reader import check_depth, check_objects
from ..http.request_body import ENCODINGS, IDENTITY, content_encoding
from ..http.routing import Endpoints
from ..inference_gate import InferenceGate
from ..journals.response_store import ResponseStore
from ..journals.resumable_streams import ResumableStreams
from ..protocol_options import DEFAULT_OPTIONS, ProtocolOptions

DEFAULT_MAX_BODY_BYTES: Final = 4 << 20
"""The text of a million tokens; parsing JSON of that size holds the interpreter's lock for about 50 ms."""
_OBJECT_BYTES = 128
"""Reading a small object, such as a message, takes about 8 µs, so at most 2,048 are read on the event loop."""
MAX_OBJECTS = 1 << 16
"""JSON objects and lists in a body."""


def check_content_type(request: Request) -> None:
    """Raises OpenAIError 415 for a Content-Type other than JSON, which browsers send to other sites without a preflight
    request (CORS). vLLM's rule and text."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise OpenAIError(
            "Unsupported Media Type: Only 'application/json' is allowed", status=415, code="unsupported_media_type"
        )


async def read_body(gate: InferenceGate, request: Request, max_bytes: int) -> bytes:
    """The unpacked body. Raises OpenAIError 413 for more than `max_bytes`, packed or unpacked, and 415 for an unknown
    encoding; TritonError as `request_body.read_content`."""
    if (encoding := content_encoding(request)) not in (*ENCODINGS, IDENTITY):
        raise OpenAIError(
            f"Content-Encoding is {shown(encoding)}, expected one of {', '.join((*ENCODINGS, IDENTITY))}",
            status=415,
            code="unsupported_content_encoding",
        )
    try:
        return await gate.read_content(request, max_bytes)
    except BodyTooLargeError:
        raise _too_large(max_bytes) from None


def decode_cost(body: bytes) -> int:
    """A body's size for `decode_in_thread`: many small objects take longer than one long text."""
    return max(len(body), _OBJECT_BYTES * body.count(b"{"))


def json_object(body: bytes) -> dict[str, Any]:
    """Raises OpenAIError 400 for anything but a JSON object and for nesting beyond json_reader's MAX_DEPTH, TritonError
    INVALID_ARG for more than MAX_OBJECTS objects and lists."""
    check_objects(body, MAX_OBJECTS)
    try:
        check_depth(body)
        value = orjson.loads(body)
    except (orjson.JSONDecodeError, TritonError) as error:
        raise OpenAIError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise OpenAIError("the request body is not a JSON object", code="invalid_json")
    return value


def _too_large(max_bytes: int) -> OpenAIError:
    return OpenAIError(
        f"the request body is larger than the {max_bytes} bytes this server accepts; "
        "use --openai-max-input-size to increase the limit",
        status=413,
        code="content_too_large",
    )


T = TypeVar("T")
_CLIENT_CLOSED_REQUEST: Final = 499
"""Logged status when the client has disconnected."""


@dataclass(frozen=True, kw_only=True)
class ApiContext:
    """What all endpoints of a server's OpenAI and Anthropic APIs work with."""

    gate: InferenceGate
    catalog: ModelCatalog
    options: ProtocolOptions
    sealing_key: SealingKey
    streams: ResumableStreams
    store: ResponseStore | None
    """None: the server stores nothing."""
    max_body_bytes: int

    @classmethod
    def of(
        cls,
        server: Host,
        *,
        gate: InferenceGate | None = None,
        options: ProtocolOptions = DEFAULT_OPTIONS,
        streams: ResumableStreams | None = None,
        store: ResponseStore | None = None,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    ) -> ApiContext:
        """Give it the `gate` and the `streams` of the server's other frontends, if it has any."""
        return cls(
            gate=gate or InferenceGate(server),
            catalog=ModelCatalog(server, options.openai_lora_separator, options.openai_fingerprint),
            options=options,
            sealing_key=sealing_key(options.reasoning_secret),
            streams=streams or ResumableStreams(),
            store=store,
            max_body_bytes=max_body_bytes,
        )


class OpenAIEndpoints(Endpoints):
    error: ClassVar[Any] = OpenAIErrorBody
    statuses = (400, 404, 413, 415, 429, 503)
    error_types = ()
    answers_head = True
    documents: ClassVar[str] = "responses"
    """What these endpoints read from the store, for errors."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._gate = context.gate
        self._catalog = context.catalog
        self._key = context.sealing_key
        self._max_body_bytes = context.max_body_bytes

    @property
    def _store(self) -> ResponseStore:
        """Raises OpenAIError 404 if the server stores nothing."""
        if self._context.store is None:
            raise OpenAIError(f"this server stores no {self.documents}", status=404, code="unsupported")
        return self._context.store

    def refusal(self, http: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        return OpenAIError.of(error).response()

    async def body_of(self, http: Request) -> bytes:
        check_content_type(http)
        return await read_body(self._gate, http, self._max_body_bytes)

    async def parsed(self, http: Request, parse: Callable[[JsonObject], T]) -> T:
        return await self.parsed_body(await self.body_of(http), parse)

    async def parsed_body(self, body: bytes, parse: Callable[[JsonObject], T]) -> T:
        return await self._gate.decode_in_thread(decode_cost(body), lambda: parse(json_object(body)))


def json_answer(body: bytes) -> Response:
    return Response(body, media_type="application/json")
