"""KServe v2 over HTTP, the part that changes the server: repository, trace and log settings, shared memory, stop by id.

For: the HTTP application. Does not know: what settings do, regions, backends. Invariants: nothing here blocks the event
loop, loads run elsewhere; the response to a POST of settings is the settings after it.
Source: Triton's model repository, trace, logging and shared memory extensions, its http_server's texts (golden 40, 41).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pickle import PickleBuffer
from typing import Annotated, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.errors import internal, invalid_argument, unsupported
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ModelIndex
from llmbackend.core.server_log import ServerLog
from llmbackend.core.shared_memory import CUDA_HANDLE_BYTES, MemoryKind
from llmbackend.core.tracing.settings import TraceChanges

from ..http.json_reader import as_bool, as_object, as_string, as_unsigned, member, parse, parsing
from ..http.request_body import read_body, read_control
from ..http.responses import JSON, plain
from ..http.routing import Endpoints, JsonBody, get, post
from ..inference_gate import InferenceGate
from ..operations.probes import ReadinessProbes
from ..operations.settings import (
    log_changes_from_json,
    shown_log_settings,
    shown_trace_settings,
    trace_changes_from_json,
    updated_trace_settings,
)
from . import http_types
from .model_paths import model_of, model_paths

Document = Mapping[str, Any]
_EMPTY: Final[Document] = {}
_TRACE_PATHS: Final = ("/v2/trace/setting", "/v2/models/{name}/trace/setting")


def _repository_paths(action: str) -> tuple[str, ...]:
    return (f"/v2/repository{action}", f"/v2/repository/{{repository}}{action}")


def _memory_paths(kind: str, action: str) -> tuple[str, ...]:
    return (f"/v2/{kind}sharedmemory/{action}", f"/v2/{kind}sharedmemory/region/{{region}}/{action}")


class RepositoryEndpoints(Endpoints):
    """The model repository: index, load, unload. A path may name a repository; only the index ignores that."""

    def __init__(self, server: InferenceServer, gate: InferenceGate, max_body_bytes: int) -> None:
        """`max_body_bytes` bounds the body of a load, which may hold files."""
        self._server = server
        self._gate = gate
        self._probes = ReadinessProbes(server)
        self._max_body_bytes = max_body_bytes

    @post(*_repository_paths("/index"), answer=list[ModelIndex])
    async def index(
        self, request: Request, body: Annotated[Document, JsonBody(http_types.RepositoryIndexRequest)] = _EMPTY
    ) -> list[dict[str, str]]:
        """The models of the repository and their states"""
        ready_only = "ready" in body and as_bool(body["ready"])
        return [_index_json(row) for row in await self._probes.repository_index(ready_only)]

    @post(
        *_repository_paths("/models/{name}/load"),
        body=http_types.LoadRequest,
        is_body_required=False,
        response_class=Response,
    )
    async def load(self, request: Request) -> Response:
        """Load or reload a model"""
        name = self._name(request)
        body = await read_body(request, self._max_body_bytes)
        found = await self._gate.decode_in_process(len(body), load_parameters, body)
        parameters = {key: value if isinstance(value, str) else bytes(value) for key, value in found.items()}
        await asyncio.wrap_future(self._server.start_load(name, parameters))
        return plain(content_type=JSON)

    @post(
        *_repository_paths("/models/{name}/unload"),
        body=http_types.UnloadRequest,
        is_body_required=False,
        response_class=Response,
    )
    async def unload(self, request: Request) -> Response:
        """Unload a model"""
        name = self._name(request)
        parameters = _parameters(await read_control(request))
        dependents = "unload_dependents" in parameters and as_bool(parameters["unload_dependents"])
        await asyncio.to_thread(self._server.unload_model, name, dependents)
        return plain(content_type=JSON)

    def _name(self, request: Request) -> str:
        if "repository" in request.path_params:
            raise unsupported("'repository_name' specification is not supported")
        name: str = request.path_params["name"]
        return name


def _parameters(body: bytes) -> Document:
    return as_object(as_object(parse(body)).get("parameters", {})) if body else {}


def load_parameters(body: bytes) -> dict[str, Any]:
    """The `parameters` of a load request's body; files as PickleBuffers, see `InferenceGate.decode_in_process`."""
    found = dict(_load_parameter(key, value) for key, value in _parameters(body).items())
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
    return {key: value for key, value in asdict(row).items() if value or key == "name"}


class SettingsEndpoints(Endpoints):
    """The trace and log settings; versions of a model have none of their own."""

    def __init__(self, server: InferenceServer, log: ServerLog) -> None:
        self._server = server
        self._log = log

    @get(*_TRACE_PATHS, answer=http_types.TraceSettings)
    async def trace(self, request: Request) -> dict[str, Any]:
        """The trace settings of the server, or of one model"""
        return await self._traced(request)

    @post(*_TRACE_PATHS, answer=http_types.TraceSettings)
    async def set_trace(
        self, request: Request, body: Annotated[Document, JsonBody(http_types.TraceSetting)]
    ) -> dict[str, Any]:
        """Change the trace settings of the server, or of one model; null takes a setting back"""
        return await self._traced(request, partial(trace_changes_from_json, body))

    async def _traced(self, request: Request, changes: Callable[[], TraceChanges] | None = None) -> dict[str, Any]:
        name = request.path_params.get("name", "")
        settings = await asyncio.to_thread(updated_trace_settings, self._server, name, changes)
        shown = shown_trace_settings(settings)
        return {key: values if key == "trace_level" else values[0] for key, values in shown.items()}

    @get("/v2/logging", answer=http_types.LogSettings)
    async def logging(self, request: Request) -> dict[str, Any]:
        """The log settings"""
        return shown_log_settings(self._log.settings)

    @post("/v2/logging", answer=http_types.LogSettings)
    async def set_logging(
        self, request: Request, body: Annotated[Document, JsonBody(http_types.LogSetting)]
    ) -> dict[str, Any]:
        """Change the log settings"""
        self._log.update(**log_changes_from_json(body))
        return shown_log_settings(self._log.settings)


class SharedMemoryEndpoints(Endpoints):
    """System and CUDA shared memory: status, register, unregister; of one region, or of all."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    @get(*_memory_paths("system", "status"))
    async def system_status(self, request: Request) -> list[http_types.SystemRegion]:
        """The registered regions of system shared memory"""
        return [
            {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
            for region in self._server.shared_memory.status(MemoryKind.SYSTEM, _region(request))
        ]

    @post(*_memory_paths("system", "register"), response_class=Response)
    async def register_system(
        self, request: Request, body: Annotated[Document, JsonBody(http_types.SystemRegistration)]
    ) -> Response:
        """Register a region, which the path must name"""
        key = as_string(_required(body, "key"))
        offset = as_unsigned(body.get("offset", 0))
        byte_size = as_unsigned(_required(body, "byte_size"))
        self._server.shared_memory.register_system(_region(request), key, offset, byte_size)
        return plain(content_type=JSON)

    @post(*_memory_paths("system", "unregister"), response_class=Response)
    async def unregister_system(self, request: Request) -> Response:
        """Forget a region, once no running request writes to it"""
        self._server.shared_memory.unregister(MemoryKind.SYSTEM, _region(request))
        return plain(content_type=JSON)

    @get(*_memory_paths("cuda", "status"), answer=list[http_types.CudaRegion])
    async def cuda_status(self, request: Request) -> list[Any]:
        """The registered regions of CUDA shared memory: none"""
        return self._server.shared_memory.status(MemoryKind.CUDA, _region(request))

    @post(*_memory_paths("cuda", "register"), response_class=Response)
    async def register_cuda(
        self, request: Request, body: Annotated[Document, JsonBody(http_types.CudaRegistration)]
    ) -> Response:
        """Refused: this server maps no memory of GPUs"""
        handle = _decoded(as_string(member(_required(body, "raw_handle"), "b64")))
        byte_size = as_unsigned(member(body, "byte_size"))
        device_id = as_unsigned(member(body, "device_id"))
        self._server.shared_memory.register_cuda(_region(request), handle, byte_size, device_id)
        return plain(content_type=JSON)

    @post(*_memory_paths("cuda", "unregister"), response_class=Response)
    async def unregister_cuda(self, request: Request) -> Response:
        """Forget a region: there is none"""
        self._server.shared_memory.unregister(MemoryKind.CUDA, _region(request))
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


class StopEndpoint(Endpoints):
    """Ends running requests by the id that their client gave them, whichever protocol they came by; for clients that
    cannot close the connection of the request. The stopped request is itself answered, with CANCELLED.

    Source: MindIE's stopInfer (body `{"id": "..."}`), served under both names. The response is our own: the id, and how
    many running requests had it; 0 is no error, since a request may end just before."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    async def read(self, http: Request, body: JsonBody, *, may_be_empty: bool) -> Any:
        model_of(http)  # a path that is no version of a model is a 404, whatever the body is
        return await super().read(http, body, may_be_empty=may_be_empty)

    @post(*model_paths("/stop"), *model_paths("/stopInfer"))
    async def stop(
        self, request: Request, body: Annotated[Document, JsonBody(http_types.StopRequest)]
    ) -> http_types.Stopped:
        """Stop running requests by their id"""
        name, version = model_of(request)
        with parsing("id"):
            request_id = as_string(member(body, "id"))
        if not request_id:
            raise invalid_argument("'id' is empty, expected the id of a request")
        return {"id": request_id, "cancelled": self._server.cancel_requests(name, version, request_id)}
