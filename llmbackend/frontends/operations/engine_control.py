"""What operators do to a server's work: end a request that runs, kill the process of an instance.

For: the operations router. Does not know: how a backend computes, who may call (access control does). Invariants:
nothing here waits for a backend on the event loop; where faults are not allowed, none is injected.
"""

from __future__ import annotations

import asyncio
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.errors import invalid_argument, shown
from llmbackend.core.inference_server import InferenceServer

from ..errors import PermissionDeniedError
from ..http.openapi_parts import Json, array, closed, json_response, operation, refusals
from ..http.responses import JSON, plain
from ..http.routing import Router

CANCEL_PATH: Final = "/v2/engine/requests/{request}/cancel"
KILL_PATH: Final = "/v2/engine/instances/{name}/{version}/{instance}/kill"
NO_FAULTS: Final = "this server kills no engines: it was started without --allow-fault-injection"
_MAX_DIGITS: Final = 18
_POSITIVE: Final = {"type": "integer", "minimum": 1}
SCHEMAS: Json = {
    "CancelledRequest": closed({"request": _POSITIVE}),
    "KilledInstance": closed({"instance": {"type": "string"}, "pids": array(_POSITIVE)}),
}
OPERATIONS: dict[tuple[str, str], Json] = {
    ("POST", CANCEL_PATH): operation(
        "Cancel a request in flight by its number in /v2/engine/events",
        {"200": json_response("CancelledRequest")} | refusals("Error", 400, 404),
    ),
    ("POST", KILL_PATH): operation(
        "Kill the engine of an instance, as a crash would (--allow-fault-injection)",
        {"200": json_response("KilledInstance")} | refusals("Error", 400, 404, 501, 503),
    ),
}


class EngineControlEndpoints:
    def __init__(self, server: InferenceServer, *, allows_faults: bool) -> None:
        self._server = server
        self._allows_faults = allows_faults

    def add_to(self, router: Router) -> None:
        router.add_handler(CANCEL_PATH, self.cancel, methods=["POST"])
        router.add_handler(KILL_PATH, self.kill, methods=["POST"])

    async def cancel(self, request: Request) -> Response:
        """The cancelled request is itself answered, as one that its client cancels."""
        number = _number(request, "request", "the number of a request, as in /v2/engine/events")
        self._server.cancel_request(number)
        return plain(orjson.dumps({"request": number}), content_type=JSON)

    async def kill(self, request: Request) -> Response:
        if not self._allows_faults:
            raise PermissionDeniedError(NO_FAULTS)
        model, instance = request.path_params["name"], request.path_params["instance"]
        version = _number(request, "version", "the number of a version")
        pids = await asyncio.to_thread(self._server.kill_instance, model, version, instance)
        return plain(orjson.dumps({"instance": instance, "pids": pids}), content_type=JSON)


def _number(request: Request, name: str, expected: str) -> int:
    """A number of the path. Raises TritonError INVALID_ARG naming it."""
    text: str = request.path_params[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise invalid_argument(f"{name} is {shown(text)}, expected {expected}")
    return int(text)
