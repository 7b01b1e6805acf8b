"""GET and POST of the trace and log settings.

For: the HTTP app. Does not know: what the settings do. Invariant: the answer to a POST is the settings as they are
after it. Source: Triton's trace and logging extensions (golden 41).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmbackend.core.inference_server import InferenceServer
from llmbackend.server_log import ServerLog

from . import log_settings, trace_settings
from .control_body import read_control
from .json_reader import as_object, parse
from .kserve_http import json_response


class SettingsEndpoints:
    def __init__(self, server: InferenceServer, log: ServerLog) -> None:
        self._server = server
        self._log = log

    def add_to(self, router: APIRouter) -> None:
        """Before the models: /v2/models/{name} must not swallow these."""
        for path in ("/v2/trace/setting", "/v2/models/{name}/trace/setting"):  # versions have none of their own
            router.add_api_route(path, self.trace, methods=["GET", "POST"])
        router.add_api_route("/v2/logging", self.logging, methods=["GET", "POST"])

    async def trace(self, request: Request) -> Response:
        name = request.path_params.get("name", "")
        changes = None
        if request.method == "POST":
            changes = partial(trace_settings.changes_from_json, await self._document(request))
        settings = await asyncio.to_thread(trace_settings.updated, self._server, name, changes)
        shown = trace_settings.shown(settings)
        return json_response({key: values if key == "trace_level" else values[0] for key, values in shown.items()})

    async def logging(self, request: Request) -> Response:
        if request.method == "POST":
            self._log.update(**log_settings.changes_from_json(await self._document(request)))
        return json_response(log_settings.shown(self._log.settings))

    async def _document(self, request: Request) -> Any:
        return as_object(parse(await read_control(request)))
