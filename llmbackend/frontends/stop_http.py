"""POST …/stop: ends running requests by the id that their client gave them.

For: the HTTP app; for clients that can not close the connection of the request they want to end. Does not know: which
protocol a request came by: it finds all. Invariant: the stopped request itself is answered, with CANCELLED.
Source: MindIE's stopInfer (body `{"id": "..."}`), served under both names. Its answer is ours: the id, and how many
live requests had it; 0 is no error, since a request may end just before.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmbackend.core.errors import invalid_argument
from llmbackend.core.inference_server import InferenceServer

from .control_body import read_control
from .json_reader import as_object, as_string, member, parse, parsing
from .kserve_http import MODEL_PATHS, json_response, model_of


class StopEndpoint:
    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    def add_to(self, router: APIRouter) -> None:
        for path in MODEL_PATHS:
            router.add_api_route(f"{path}/stop", self.stop, methods=["POST"])
            router.add_api_route(f"{path}/stopInfer", self.stop, methods=["POST"])

    async def stop(self, request: Request) -> Response:
        name, version = model_of(request)
        body = as_object(parse(await read_control(request)))
        with parsing("id"):
            request_id = as_string(member(body, "id"))
        if not request_id:
            raise invalid_argument("'id' is empty, expected the id of a request")
        count = self._server.cancel_requests(name, version, request_id)
        return json_response({"id": request_id, "cancelled": count})
