"""Shared by all endpoints of the OpenAI and Anthropic APIs: body reading, list pages, errors.

Invariants: bodies are read within the server's limits, large ones are parsed in a thread; errors have the API's format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import orjson
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from llmbackend.core.errors import TritonError, shown

from ..context import FrontendContext
from ..errors import BodyTooLargeError
from ..http.errors import JsonObject, OpenAIError, OpenAIErrorBody, refuse
from ..http.json_reader import check_depth, check_objects
from ..http.request_body import ENCODINGS, IDENTITY, content_encoding
from ..http.routing import Endpoints, whole_number
from ..inference_gate import InferenceGate
from ..journals.documents import Kind
from ..journals.response_store import NotStoredError, ResponseStore

_OBJECT_BYTES = 128
"""Reading a small object, such as a message, takes about 8 µs, so at most 2,048 are read on the event loop."""
MAX_OBJECTS = 1 << 16
"""Limit of JSON objects and lists in a body."""


def check_content_type(request: Request) -> None:
    """Raises OpenAIError 415 for a Content-Type other than JSON: browsers send such requests to other sites without a
    preflight request (CORS). vLLM's rule and text."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise OpenAIError(
            "Unsupported Media Type: Only 'application/json' is allowed", status=415, code="unsupported_media_type"
        )


async def read_body(gate: InferenceGate, request: Request, max_bytes: int) -> bytes:
    """The decompressed body. Raises OpenAIError 413 for more than `max_bytes`, compressed or decompressed, and 415 for
    an unknown encoding; TritonError as `request_body.read_content`."""
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


class OpenAIEndpoints(Endpoints):
    error: ClassVar[Any] = OpenAIErrorBody
    statuses = (400, 404, 413, 415, 429, 503)
    error_types = ()
    answers_head = True
    documents: ClassVar[str] = "responses"
    """What these endpoints read from the store, for error messages."""

    def __init__(self, context: FrontendContext) -> None:
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
        return (not_found(error) if isinstance(error, NotStoredError) else OpenAIError.of(error)).response()

    async def body_of(self, http: Request) -> bytes:
        check_content_type(http)
        return await read_body(self._gate, http, self._max_body_bytes)

    async def parsed(self, http: Request, parse: Callable[[JsonObject], T]) -> T:
        return await self.parsed_body(await self.body_of(http), parse)

    async def parsed_body(self, body: bytes, parse: Callable[[JsonObject], T]) -> T:
        return await self._gate.decode_in_thread(decode_cost(body), lambda: parse(json_object(body)))


_NOT_FOUND: Final[Mapping[Kind, tuple[str, str]]] = {
    "response": ("Response", "response_not_found"),
    "conversation": ("Conversation", "not_found"),
    "chat.completion": ("Chat completion", "not_found"),
}
"""(name, error code) of each kind of document."""


def not_found(error: NotStoredError, param: str | None = None) -> OpenAIError:
    name, code = _NOT_FOUND[error.kind]
    return OpenAIError(f"{name} with id '{error.id[:80]}' not found.", param=param, status=404, code=code)


def json_answer(body: bytes) -> Response:
    return Response(body, media_type="application/json")


_MAX_ITEMS = 100
PAGE_PARAMETERS: tuple[JsonObject, ...] = (
    {
        "name": "after",
        "in": "query",
        "schema": {"type": "string"},
        "description": "The item after which the page begins.",
    },
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_ITEMS}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
)


@dataclass(frozen=True, slots=True)
class PageQuery:
    after: str | None = None
    """The id of the item after which the page begins."""
    limit: int = 20
    is_descending: bool = True
    """The latest first."""


QUERY_PARAMETER: Final = "query parameter"
INCLUDE_NAMES: Final = ("include", "include[]")
"""The query parameter for additional fields. It may occur several times, as in the official clients, and name several
values separated by commas."""


def read_include(query: QueryParams, includable: Collection[str]) -> set[str]:
    """The values of `include`. Raises OpenAIError for one that is not in `includable`."""
    texts = (text for name in INCLUDE_NAMES for text in query.getlist(name))
    included = {value for text in texts for value in text.split(",") if value}
    if unknown := sorted(included.difference(includable)):
        raise refuse("include", f"one of {', '.join(includable)}", unknown[0])
    return included


def check_names(names: Iterable[str], known: Collection[str], kind: str) -> None:
    """Raises OpenAIError for a name that is not in `known`. kind: of what is named, for the error"""
    for name in names:
        if name not in known:
            raise OpenAIError(f"unknown {kind} '{name[:80]}'", param=name[:80], code="unknown_parameter")


def read_page_query(
    parameters: QueryParams, includable: Collection[str] = (), default_order: str = "desc"
) -> PageQuery:
    """Parses the query of a URL. includable: what `include` may name; every item has it anyway. Raises OpenAIError."""
    known = ("after", "limit", "order", *(INCLUDE_NAMES if includable else ()))
    check_names(parameters, known, QUERY_PARAMETER)
    read_include(parameters, includable)
    text, order = parameters.get("limit", "20"), parameters.get("order", default_order)
    if (limit := whole_number(text, 1, _MAX_ITEMS)) is None:
        raise refuse("limit", f"an integer from 1 to {_MAX_ITEMS}", text)
    if order not in ("asc", "desc"):
        raise refuse("order", '"asc" or "desc"', order)
    return PageQuery(parameters.get("after") or None, limit, order == "desc")


def page(items: Sequence[JsonObject], query: PageQuery) -> JsonObject:
    """items: the whole list, oldest first. Raises OpenAIError if `after` is not the id of an item."""
    ordered = items[::-1] if query.is_descending else items
    begin = 0
    if query.after is not None:
        begin = next((index + 1 for index, item in enumerate(ordered) if item.get("id") == query.after), 0)
        if not begin:
            raise not_listed(query.after)
    return item_list(ordered[begin : begin + query.limit], has_more=begin + query.limit < len(ordered))


def not_listed(after: str) -> OpenAIError:
    return refuse("after", "the id of an item of the list", after)


def item_list(items: Sequence[JsonObject], *, has_more: bool = False) -> JsonObject:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0].get("id") if items else None,
        "last_id": items[-1].get("id") if items else None,
        "has_more": has_more,
    }
