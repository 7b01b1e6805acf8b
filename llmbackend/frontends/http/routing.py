"""Routes on FastAPI: an endpoint is a method that declares its path, argument and answer; openapi.py documents them.

Invariants: FastAPI parses nothing: `Endpoints.read` reads bodies within the server's limits, endpoints read paths and
queries. Only APIs with `answers_head` answer HEAD like GET; Triton's API does not.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_args, get_origin
from urllib.parse import unquote

from fastapi import APIRouter
from fastapi.dependencies.utils import get_typed_return_annotation
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from pydantic_core import CoreSchema, core_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import Error
from .json_reader import as_object, dump, parse
from .request_body import read_control
from .responses import JSON, plain

Json = dict[str, Any]
Count = Annotated[int, Field(ge=0)]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Any]])

_DECLARED: Final = "llmbackend_routes"
_MEANING: Final = {
    400: "The request is invalid, or the model does not support what it asks for, such as tool calls.",
    401: "No API key, or a wrong one, on a server with keys.",
    403: "This API is restricted to clients that send a certain header.",
    404: "No such path, model, version or object.",
    408: "The request did not arrive in time.",
    413: "The body is larger than the server accepts.",
    415: "The body is not of Content-Type application/json.",
    429: "Too many requests: try again after `Retry-After` seconds.",
    431: "The header is larger than the server accepts.",
    500: "Triton's code INTERNAL: malformed JSON, a failed load, or an error in the model.",
    501: "Not supported by this server or this model.",
    503: "Temporary: the model is not ready, its queue is full, or the server is exiting.",
    529: "Temporary: like 503 elsewhere.",
}
_RETRY_AFTER: Final = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}
_NUMBER: Final = {"type": "string", "pattern": "^[0-9]{1,18}$"}
_PATH_PARAMETERS: Final[dict[str, Json]] = {
    "version": _NUMBER,
    "request": _NUMBER,
    "repository": {"type": "string", "minLength": 1, "description": "Accepted for the index only."},
    "region": {"type": "string", "minLength": 1, "description": "Default: all regions."},
}
_NAME: Final = {"type": "string", "minLength": 1}


def ref(model: Any) -> Json:
    """A schema that refers to the component of `model`, which may be a union or a list."""
    kinds = get_args(model)
    if get_origin(model) is list:
        return {"type": "array", "items": ref(kinds[0])}
    if kinds:
        return {"anyOf": [ref(kind) for kind in kinds]}
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def path_parameters(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS.get(name, _NAME)}
        for name in re.findall(r"\{(\w+)", path)
    ]


def _refusals(error: Any, statuses: Iterable[int], content_types: Iterable[str]) -> dict[int | str, Json]:
    """The error responses of an API, including those of access control and of the connection layer."""
    content: Json = {kind: {} for kind in content_types} | {JSON: {"schema": ref(error)}}
    return {
        status: {"description": _MEANING[status], "content": content}
        | ({"headers": _RETRY_AFTER} if status in (429, 503, 529) else {})
        for status in sorted({401, 403, 408, 413, 429, 431, *statuses})
    }


def whole_number(text: str, low: int, high: int) -> int | None:
    """The number in a path or query, in ASCII digits; None unless it is from `low` to `high`."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(high))
    return number if is_number and low <= (number := int(text)) <= high else None


class DescribedBy:
    """Annotation of a value that pydantic documents as the type `model` but does not check."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return handler(TypeAdapter(self.model).core_schema)


class JsonBody(DescribedBy):
    """Annotation of an endpoint's argument, an object in the JSON body; optional if the argument has a default."""


def route(method: str, *paths: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Declares a method of `Endpoints` as the endpoint of `paths`. options: passed to ApiRoute."""

    def declare(endpoint: Endpoint) -> Endpoint:
        declared = [(path, options | {"methods": [method]}) for path in paths]
        setattr(endpoint, _DECLARED, getattr(endpoint, _DECLARED, []) + declared)
        return endpoint

    return declare


get, post, delete = partial(route, "GET"), partial(route, "POST"), partial(route, "DELETE")


class Endpoints:
    """The endpoints of one API. The defaults are Triton's API, whose errors the application answers."""

    error: ClassVar[Any] = Error
    """Type of the JSON of an error response."""
    statuses: ClassVar[tuple[int, ...]] = (400, 404, 500, 501, 503)
    """Statuses of error responses, in addition to those that every API has."""
    error_types: ClassVar[tuple[str, ...]] = ("text/plain",)
    """Additional content types of error responses."""
    answers_head: ClassVar[bool] = False
    """Whether GET implies HEAD."""

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes in declaration order, which is also the matching order."""
        for name, method in vars(type(self)).items():
            for path, options in getattr(method, _DECLARED, ()):
                route = ApiRoute(path, getattr(self, name), self, **options)
                router.routes.append(route)
                if self.answers_head and options["methods"] == ["GET"]:
                    router.routes.append(Route(path, route.get_route_handler(), methods=["HEAD"]))

    def check(self, http: Request) -> None:
        """Raises an error if the request is refused regardless of its path."""

    async def read(self, http: Request, *, may_be_empty: bool) -> Any:
        """The argument; None: the body is empty. Raises the errors that `refusal` answers."""
        content = await read_control(http)
        return None if may_be_empty and not content else as_object(parse(content))

    def refusal(self, http: Request, error: Exception) -> Response:
        """The response to `error`; re-raises what the application must answer."""
        raise error

    async def answer(self, http: Request, endpoint: Callable[[Request], Awaitable[Response]]) -> Response:
        """The response of `endpoint`, or the response to its error."""
        try:
            self.check(http)
            return await endpoint(http)
        except Exception as error:
            return self.refusal(http, error)


class CatchAll:
    """Refuses unrouted requests with any method. An ASGI application, since routes to functions list their methods."""

    def __init__(self, api: Endpoints, refuse: Callable[[Request], Awaitable[Response]]) -> None:
        self._api = api
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._api.answer(Request(scope, receive), self._refuse)
        await response(scope, receive, send)


class ApiRoute(APIRoute):
    """A path of an API.

    answer: type of a 200's JSON; by default the endpoint's return type
    body: type of a JSON body that the endpoint reads itself; body_content: its other content types
    parameters: of query and header, as OpenAPI
    streams: description of events that the endpoint can answer with
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Awaitable[Any]],
        api: Endpoints,
        *,
        methods: list[str],
        answer: Any = None,
        body: Any = None,
        body_content: Json | None = None,
        is_body_required: bool = True,
        parameters: Sequence[Json] = (),
        streams: str = "",
        response_class: type[Response] = JSONResponse,
        status_code: int | None = None,
        responses: dict[int | str, Json] | None = None,
    ) -> None:
        self._api = api
        self.is_direct = body is not None
        """Whether the endpoint takes only the request."""
        summary = " ".join((endpoint.__doc__ or "").partition("\n\n")[0].split())
        statuses = [status for status in api.statuses if status != 415 or body is not None]
        documented = _refusals(api.error, statuses, api.error_types) | (responses or {})
        if streams:
            documented |= {200: {"description": streams, "content": {"text/event-stream": {}}}}
        answer = get_typed_return_annotation(endpoint) if answer is None else answer
        if isinstance(answer, type) and issubclass(answer, Response):
            answer = None
        if answer is not None:  # FastAPI would create a serializer for a response_model at once
            found = documented.get(200, {})
            documented[200] = found | {"content": {JSON: {"schema": ref(answer)}} | found.get("content", {})}
        extra: Json = {"parameters": [*path_parameters(path), *parameters]}
        if body is not None:
            extra["requestBody"] = {
                "required": is_body_required,
                "content": {JSON: {"schema": ref(body)}} | (body_content or {}),
            }
        super().__init__(
            path,
            endpoint,
            methods=methods,
            operation_id=f"{methods[0]} {re.sub(r':path}', '}', path)}",
            summary=summary,
            description=" ",  # otherwise FastAPI shows the docstring
            response_class=response_class,
            status_code=status_code,
            responses=documented,
            openapi_extra=extra,
            response_model=None,
        )
        request = body if self._json_body is None else self._json_body.model
        self.models: list[tuple[Any, JsonSchemaMode]] = [(api.error, "serialization")]
        """Types of the body and the responses, each with pydantic's mode."""
        if request is not None:
            self.models.append((request, "validation"))
        if answer is not None:
            self.models.append((answer, "serialization"))

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Called by FastAPI."""
        metadata = [] if self.body_field is None else self.body_field.field_info.metadata
        self._json_body = next((item for item in metadata if isinstance(item, JsonBody)), None)
        return self._handle

    async def _handle(self, http: Request) -> Response:
        return await self._api.answer(http, self._answer)

    async def _answer(self, http: Request) -> Response:
        answer = await self.endpoint(http, **await self._arguments(http))
        return answer if isinstance(answer, Response) else plain(dump(answer), content_type=JSON)

    async def _arguments(self, http: Request) -> Json:
        field = self.body_field
        if field is None or self._json_body is None:
            return {}
        argument = await self._api.read(http, may_be_empty=not field.field_info.is_required())
        return {} if argument is None else {field.name: argument}


ENCODED_SLASH: Final = "%2F"


def with_routed_paths(app: ASGIApp, root_path: str = "") -> ASGIApp:
    """Wraps `app`: removes a trailing slash, which some clients send, from paths under /v1, and keeps encoded slashes
    in names under /v2, so that each name is one path segment. root_path: a prefix to remove unless a proxy has done
    so"""

    def served(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path: str = scope.get("path", "")
        if root_path and path.startswith(f"{root_path}/"):
            path = scope["path"] = path.removeprefix(root_path)
            scope["raw_path"] = scope["raw_path"].removeprefix(root_path.encode())
        if path.startswith("/v1/") and path.endswith("/"):
            scope["path"] = path.rstrip("/")
        elif path.startswith("/v2/") and b"%2F" in (raw := scope.get("raw_path") or b"").upper():
            parts = raw.decode("latin-1").partition("?")[0].split("/")
            scope["path"] = "/".join(unquote(part).replace("/", ENCODED_SLASH) for part in parts)
        return app(scope, receive, send)

    return served
