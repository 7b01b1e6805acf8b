"""What all endpoints of OpenAI's API have in common: how bodies are read, and errors answered.

For: the modules with endpoints, beside this one and in responses_api. Does not know: any path. Invariant: a body is
read within the server's bounds, and parsed in a thread where it is large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..http.errors import OpenAIErrorBody
from ..http.routing import Endpoints
from ..inference_gate import InferenceGate
from .errors import JsonObject, OpenAIError
from .requests import check_content_type, decode_cost, json_object, read_body

T = TypeVar("T")
_CLIENT_CLOSED_REQUEST: Final = 499
"""Status, for the log, of a response whose client has disconnected."""


class OpenAIEndpoints(Endpoints):
    error: ClassVar[Any] = OpenAIErrorBody
    statuses = (400, 404, 413, 415, 429, 503)
    error_types = ()
    answers_head = True

    def __init__(self, gate: InferenceGate, max_body_bytes: int = 0) -> None:
        self._gate = gate
        self._max_body_bytes = max_body_bytes

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
