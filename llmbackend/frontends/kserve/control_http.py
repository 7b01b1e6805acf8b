"""KServe v2 over HTTP except inference: health, metadata, statistics, repository, settings, shared memory, stop by id.

Invariants: loads and readiness checks do not block the event loop; the response to a POST of settings contains the
settings after it. Sources: KServe v2 and Triton's extensions; bodies and texts of Triton 2.51 (golden 40, 41).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pickle import PickleBuffer
from typing import Annotated, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from tritonclient.grpc.service_pb2 import ModelStatistics

from llmbackend.core.config_readers import config_to_json
from llmbackend.core.errors import internal, invalid_argument, unavailable, unsupported
from llmbackend.core.host_protocol import Host
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ModelIndex, ServerMetadata
from llmbackend.core.server_log import ServerLog
from llmbackend.core.shared_memory import CUDA_HANDLE_BYTES, MemoryKind
from llmbackend.core.tracing.trace import TraceChanges

from ..http.errors import error_body, error_response
from ..http.json_reader import as_bool, as_object, as_string, as_unsigned, member, parse, parsing
from ..http.request_body import read_body, read_control
from ..http.responses import JSON, TEXT, plain
from ..http.routing import Endpoints, JsonBody, get, post
from ..inference_gate import InferenceGate
from ..operations.settings import (
    log_changes_from_json,
    shown_log_settings,
    shown_trace_settings,
    trace_changes_from_json,
    updated_trace_settings,
)
from . import http_types
from .http_types import model_name_of, model_of, model_paths


class HealthEndpoints(Endpoints):
    """Answers 200 or 400, without a body."""

    def __init__(self, gate: InferenceGate) -> None:
        self._server = gate.server
        self._readiness = gate.readiness

    @get("/v2/health/live", response_class=Response)
    async def live(self, request: Request) -> Response:
        """Is the server alive?"""
        if self._server.is_exiting:
            return error_response(unavailable("Server exiting"), TEXT)
        return plain(status=200 if self._server.is_live() else 400)

    @get("/v2/health/ready", response_class=Response)
    async def ready(self, request: Request) -> Response:
        """Is the server ready for requests? Under strict readiness: is every model ready?"""
        if self._server.is_exiting:
            return error_response(unavailable("Server exiting"), TEXT)
        return plain(status=200 if await self._readiness.server_is_ready() else 400)

    @get(*model_paths("/ready"), response_class=Response)
    async def model_ready(self, request: Request) -> Response:
        """Is the model ready?"""
        name, version = model_of(request)
        if await self._readiness.model_is_ready(name, version):
            return plain()
        return plain(error_body("Model version not ready"), 400)


class MetadataEndpoints(Endpoints):
    def __init__(self, server: Host) -> None:
        self._server = server

    @get("/v2")
    async def server_metadata(self, request: Request) -> ServerMetadata:
        """Server metadata"""
        return self._server.server_metadata()

    @get(*model_paths())
    async def model_metadata(self, request: Request) -> http_types.ModelMetadata:
        """Model metadata"""
        metadata = self._server.model_metadata(*model_of(request))
        return {
            "name": metadata.name,
            "versions": metadata.versions,
            "platform": metadata.platform,
            "inputs": metadata.inputs,
            "outputs": metadata.outputs,
        }


class DescriptionEndpoints(Endpoints):
    """Must be added before MetadataEndpoints, as in Triton."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    @get("/v2/models/stats")
    async def statistics(self, request: Request) -> http_types.Statistics:
        """Statistics of every model"""
        return await asyncio.to_thread(self._statistics)

    @get(*model_paths("/stats"))
    async def model_statistics(self, request: Request) -> http_types.Statistics:
        """Statistics of one model"""
        return await asyncio.to_thread(self._statistics, *model_of(request))

    def _statistics(self, name: str = "", version: int = -1) -> http_types.Statistics:
        return statistics_to_json(self._server.model_statistics(name, version))

    @get(*model_paths("/config"), answer=http_types.ModelConfig)
    async def model_config(self, request: Request) -> dict[str, Any]:
        """The model's configuration, completed"""
        return config_to_json(self._server.model_config(*model_of(request)))


def statistics_to_json(models: Iterable[ModelStatistics]) -> http_types.Statistics:
    """Every field is present, even if it is 0."""
    return {"model_stats": [_model(model) for model in models]}


def _model(model: Any) -> http_types.ModelStatistics:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": _durations(model.inference_stats),
        "response_stats": {key: _durations(model.response_stats[key]) for key in sorted(model.response_stats)},
        "batch_stats": [{"batch_size": row.batch_size} | _durations(row) for row in model.batch_stats],
        "memory_usage": [{"type": row.type, "id": row.id, "byte_size": row.byte_size} for row in model.memory_usage],
    }


def _durations(message: Any) -> dict[str, http_types.Duration]:
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.message_type}
    return {name: {"count": duration.count, "ns": duration.ns} for name, duration in fields.items()}


Document = Mapping[str, Any]
_EMPTY: Final[Document] = {}
_TRACE_PATHS: Final = ("/v2/trace/setting", "/v2/models/{name}/trace/setting")


def _repository_paths(action: str) -> tuple[str, ...]:
    return (f"/v2/repository{action}", f"/v2/repository/{{repository}}{action}")


def _memory_paths(kind: str, action: str) -> tuple[str, ...]:
    return (f"/v2/{kind}sharedmemory/{action}", f"/v2/{kind}sharedmemory/region/{{region}}/{action}")


class RepositoryEndpoints(Endpoints):
    """A path may name a repository, which only the index ignores."""

    def __init__(self, server: InferenceServer, gate: InferenceGate, max_body_bytes: int) -> None:
        """max_body_bytes: limit of a load request, which may contain files"""
        self._server = server
        self._gate = gate
        self._max_body_bytes = max_body_bytes

    @post(*_repository_paths("/index"), answer=list[ModelIndex])
    async def index(
        self, request: Request, body: Annotated[Document, JsonBody(http_types.RepositoryIndexRequest)] = _EMPTY
    ) -> list[dict[str, str]]:
        """The models of the repository and their states"""
        ready_only = "ready" in body and as_bool(body["ready"])
        rows = map(asdict, await self._gate.readiness.repository_index(ready_only))
        return [{key: value for key, value in row.items() if value or key == "name"} for row in rows]

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
        return model_name_of(request)


def _parameters(body: bytes) -> Document:
    return as_object(as_object(parse(body)).get("parameters", {})) if body else {}


def load_parameters(body: bytes) -> dict[str, Any]:
    """The `parameters` of a load request, with files as PickleBuffers; runs in `InferenceGate.decode_in_process`."""
    found = dict(_load_parameter(key, value) for key, value in _parameters(body).items())
    return {key: PickleBuffer(value) if isinstance(value, bytes) else value for key, value in found.items()}


def _load_parameter(key: str, value: Any) -> tuple[str, str | bytes]:
    if key == "config":
        return key, as_string(value)
    if key.startswith("file:"):
        try:
            return key, base64.b64decode(as_string(value), validate=True)
        except ValueError as error:  # binascii.Error, or a non-ASCII character
            raise invalid_argument(f"load parameter '{key}' is not base64: {error}") from None
    raise internal("unexpected error on creating Triton parameter")


class SettingsEndpoints(Endpoints):
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
        """Change the trace settings of the server, or of one model; null resets a setting"""
        return await self._traced(request, partial(trace_changes_from_json, body))

    async def _traced(self, request: Request, changes: Callable[[], TraceChanges] | None = None) -> dict[str, Any]:
        name = model_name_of(request) if "name" in request.path_params else ""
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
        """Unregister a region, once no running request writes to it"""
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
        """Refused: this server does not map GPU memory"""
        handle = _decoded(as_string(member(_required(body, "raw_handle"), "b64")))
        byte_size = as_unsigned(member(body, "byte_size"))
        device_id = as_unsigned(member(body, "device_id"))
        self._server.shared_memory.register_cuda(_region(request), handle, byte_size, device_id)
        return plain(content_type=JSON)

    @post(*_memory_paths("cuda", "unregister"), response_class=Response)
    async def unregister_cuda(self, request: Request) -> Response:
        """Unregister a region: there are none"""
        self._server.shared_memory.unregister(MemoryKind.CUDA, _region(request))
        return plain(content_type=JSON)


def _region(request: Request) -> str:
    """The region in the path; "": every region."""
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
    """Ends running requests of any protocol by client-given id, for clients that cannot close the request's connection.
    The stopped request is answered with CANCELLED.

    Source: MindIE's stopInfer (body `{"id": "..."}`). The response is our own: the id, and the number of running
    requests with it; 0 is not an error, since a request may have just ended.
    """

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    async def read(self, http: Request, *, may_be_empty: bool) -> Any:
        model_of(http)  # a path that is not a model version is a 404, whatever the body
        return await super().read(http, may_be_empty=may_be_empty)

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
