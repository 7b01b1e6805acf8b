"""KServe v2 over HTTP, the part that changes the server: repository, trace and log settings, shared memory, stop by id.

For: the HTTP application. Does not know: what settings do, regions, backends. Invariants: nothing here blocks the event
loop, loads run elsewhere; the response to a POST of settings is the settings after it.
Source: Triton's model repository, trace, logging and shared memory extensions, its http_server's texts (golden 40, 41).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping
from functools import partial
from pickle import PickleBuffer
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.errors import internal, invalid_argument, unsupported
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ModelIndex
from llmbackend.core.server_log import ServerLog
from llmbackend.core.shared_memory import CUDA_HANDLE_BYTES, MemoryKind

from ..http.json_reader import as_bool, as_object, as_string, as_unsigned, member, parse, parsing
from ..http.request_body import read_body, read_control
from ..http.responses import JSON, json_response, plain
from ..http.routing import Router
from ..inference_gate import InferenceGate
from ..operations.probes import ReadinessProbes
from ..operations.settings import (
    log_changes_from_json,
    shown_log_settings,
    shown_trace_settings,
    trace_changes_from_json,
    updated_trace_settings,
)
from .model_paths import MODEL_PATHS, model_of


class RepositoryEndpoints:
    """The model repository: index, load, unload. A path may name a repository; only the index ignores that."""

    def __init__(self, server: InferenceServer, gate: InferenceGate, max_body_bytes: int) -> None:
        """`max_body_bytes` bounds the body of a load, which may hold files."""
        self._server = server
        self._gate = gate
        self._probes = ReadinessProbes(server)
        self._max_body_bytes = max_body_bytes

    def add_to(self, router: Router) -> None:
        for path in ("/v2/repository", "/v2/repository/{repository}"):
            router.add_handler(f"{path}/index", self.index, methods=["POST"])
            router.add_handler(f"{path}/models/{{name}}/load", self.load, methods=["POST"])
            router.add_handler(f"{path}/models/{{name}}/unload", self.unload, methods=["POST"])

    async def index(self, request: Request) -> Response:
        body = _optional_document(await read_control(request))
        ready_only = "ready" in body and as_bool(body["ready"])
        rows = await self._probes.repository_index(ready_only)
        return json_response([_index_json(row) for row in rows])

    async def load(self, request: Request) -> Response:
        name = self._name(request)
        body = await read_body(request, self._max_body_bytes)
        found = await self._gate.decode_in_process(len(body), load_parameters, body)
        parameters = {key: value if isinstance(value, str) else bytes(value) for key, value in found.items()}
        await asyncio.wrap_future(self._server.start_load(name, parameters))
        return plain(content_type=JSON)

    async def unload(self, request: Request) -> Response:
        name = self._name(request)
        parameters = _parameters(_optional_document(await read_control(request)))
        dependents = "unload_dependents" in parameters and as_bool(parameters["unload_dependents"])
        await asyncio.to_thread(self._server.unload_model, name, dependents)
        return plain(content_type=JSON)

    def _name(self, request: Request) -> str:
        if "repository" in request.path_params:
            raise unsupported("'repository_name' specification is not supported")
        name: str = request.path_params["name"]
        return name


async def _document(request: Request) -> Mapping[str, Any]:
    return as_object(parse(await read_control(request)))


def _optional_document(body: bytes) -> Mapping[str, Any]:
    return as_object(parse(body)) if body else {}


def _parameters(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return as_object(document.get("parameters", {}))


def load_parameters(body: bytes) -> dict[str, Any]:
    """The `parameters` of a load request's body; files as PickleBuffers, see `InferenceGate.decode_in_process`."""
    found = dict(_load_parameter(key, value) for key, value in _parameters(_optional_document(body)).items())
    return {key: PickleBuffer(value) if isinstance(value, bytes) else value for key, value in found.items()}


def _load_parameter(key: str, value: Any) -> tuple[str, str | bytes]:
    if key == "config":
        return key, as_string(value)
    if key.startswith("file:"):
        try:
            return key, base64.b64decode(as_string(value), validate=True)
        except ValueError as error:  # binascii.Error, or a character that is not ASCII
            raise invalid_argument(f"load parameter '{key}' is not base64: {error}") from None
    raise internal("unexpected error on creating Triton parameter")


def _index_json(row: ModelIndex) -> dict[str, str]:
    fields = {"name": row.name, "version": row.version, "state": row.state, "reason": row.reason}
    return {key: value for key, value in fields.items() if value or key == "name"}


class SettingsEndpoints:
    """GET and POST of the trace and log settings."""

    def __init__(self, server: InferenceServer, log: ServerLog) -> None:
        self._server = server
        self._log = log

    def add_to(self, router: Router) -> None:
        """Must be called before the routes of models are added, since /v2/models/{name} matches these, too."""
        for path in ("/v2/trace/setting", "/v2/models/{name}/trace/setting"):  # versions have no settings of their own
            router.add_handler(path, self.trace, methods=["GET", "POST"])
        router.add_handler("/v2/logging", self.logging, methods=["GET", "POST"])

    async def trace(self, request: Request) -> Response:
        name = request.path_params.get("name", "")
        changes = None
        if request.method == "POST":
            changes = partial(trace_changes_from_json, await _document(request))
        settings = await asyncio.to_thread(updated_trace_settings, self._server, name, changes)
        shown = shown_trace_settings(settings)
        return json_response({key: values if key == "trace_level" else values[0] for key, values in shown.items()})

    async def logging(self, request: Request) -> Response:
        if request.method == "POST":
            self._log.update(**log_changes_from_json(await _document(request)))
        return json_response(shown_log_settings(self._log.settings))


class SharedMemoryEndpoints:
    """System and CUDA shared memory: status, register, unregister; of one region, or of all."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    def add_to(self, router: Router) -> None:
        for prefix, kind, register in (
            ("/v2/systemsharedmemory", MemoryKind.SYSTEM, self._register_system),
            ("/v2/cudasharedmemory", MemoryKind.CUDA, self._register_cuda),
        ):
            for path in (prefix, f"{prefix}/region/{{region}}"):
                router.add_handler(f"{path}/status", self._status(kind), methods=["GET"])
                router.add_handler(f"{path}/register", register, methods=["POST"])
                router.add_handler(f"{path}/unregister", self._unregister(kind), methods=["POST"])

    def _status(self, kind: MemoryKind) -> Any:
        async def status(request: Request) -> Response:
            regions = self._server.shared_memory.status(kind, _region(request))
            rows = [
                {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
                for region in regions
            ]
            return json_response(rows)

        return status

    def _unregister(self, kind: MemoryKind) -> Any:
        async def unregister(request: Request) -> Response:
            self._server.shared_memory.unregister(kind, _region(request))
            return plain(content_type=JSON)

        return unregister

    async def _register_system(self, request: Request) -> Response:
        body = await _document(request)
        key = as_string(_required(body, "key"))
        offset = as_unsigned(body.get("offset", 0))
        byte_size = as_unsigned(_required(body, "byte_size"))
        self._server.shared_memory.register_system(_region(request), key, offset, byte_size)
        return plain(content_type=JSON)

    async def _register_cuda(self, request: Request) -> Response:
        body = await _document(request)
        handle = _decoded(as_string(member(_required(body, "raw_handle"), "b64")))
        byte_size = as_unsigned(member(body, "byte_size"))
        device_id = as_unsigned(member(body, "device_id"))
        self._server.shared_memory.register_cuda(_region(request), handle, byte_size, device_id)
        return plain(content_type=JSON)


def _region(request: Request) -> str:
    """The region that the path names; "": every region."""
    name: str = request.path_params.get("region", "")
    return name


def _required(body: Mapping[str, Any], field: str) -> Any:
    if field not in body:
        raise invalid_argument(f"Shared memory register request has no '{field}' field")
    return body[field]


def _decoded(text: str) -> bytes:
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        handle = b""
    if len(handle) != CUDA_HANDLE_BYTES:
        raise invalid_argument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle


class StopEndpoint:
    """Ends running requests by the id that their client gave them, whichever protocol they came by; for clients that
    cannot close the connection of the request. The stopped request is itself answered, with CANCELLED.

    Source: MindIE's stopInfer (body `{"id": "..."}`), served under both names. The response is our own: the id, and how
    many running requests had it; 0 is no error, since a request may end just before."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    def add_to(self, router: Router) -> None:
        for path in MODEL_PATHS:
            router.add_handler(f"{path}/stop", self.stop, methods=["POST"])
            router.add_handler(f"{path}/stopInfer", self.stop, methods=["POST"])

    async def stop(self, request: Request) -> Response:
        name, version = model_of(request)
        body = await _document(request)
        with parsing("id"):
            request_id = as_string(member(body, "id"))
        if not request_id:
            raise invalid_argument("'id' is empty, expected the id of a request")
        count = self._server.cancel_requests(name, version, request_id)
        return json_response({"id": request_id, "cancelled": count})
