"""KServe v2 over HTTP, without inference: health, metadata, configuration, statistics, and the repository's control.

For: the HTTP app. Does not know: backends, inference. Invariant: nothing here blocks the event loop; what may wait
(loading, a backend's readiness) runs in a thread. Source: KServe v2 and Triton's extensions; bodies as recorded from
Triton 2.51.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from pickle import PickleBuffer
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from llmbackend.core.config.model_config import config_to_json
from llmbackend.core.errors import internal, invalid_argument, unavailable, unsupported
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ModelIndex, TensorMetadata

from .control_body import read_control
from .http_errors import JSON, TEXT, error_body, error_response, plain
from .inference import InferenceGate
from .json_reader import as_bool, as_object, as_string, dump, parse
from .readiness_probes import ReadinessProbes
from .request_body import read_body
from .statistics_json import statistics_to_json

MODEL_PATHS = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
_MAX_VERSION_DIGITS = 18


def model_of(request: Request) -> tuple[str, int]:
    """(name, version) of the request's path; version -1 when the path has none. A version that is no number: 404."""
    version = request.path_params.get("version")
    if version is None:
        return request.path_params["name"], -1
    if not (version.isascii() and version.isdecimal() and len(version) <= _MAX_VERSION_DIGITS):
        raise HTTPException(404)
    return request.path_params["name"], int(version)


def json_response(value: Any) -> Response:
    return plain(dump(value), content_type=JSON)


class HealthEndpoints:
    """Liveness and readiness: an empty 200, or 400."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._probes = ReadinessProbes(server)

    def add_to(self, router: APIRouter) -> None:
        router.add_api_route("/v2/health/live", self.live, methods=["GET"])
        router.add_api_route("/v2/health/ready", self.ready, methods=["GET"])
        for path in MODEL_PATHS:
            router.add_api_route(f"{path}/ready", self.model_ready, methods=["GET"])

    async def live(self, request: Request) -> Response:
        if self._server.is_exiting:
            return error_response(unavailable("Server exiting"), TEXT)
        return plain(status=200 if self._server.is_live() else 400)

    async def ready(self, request: Request) -> Response:
        if self._server.is_exiting:
            return error_response(unavailable("Server exiting"), TEXT)
        return plain(status=200 if await self._probes.server_is_ready() else 400)

    async def model_ready(self, request: Request) -> Response:
        name, version = model_of(request)
        if await self._probes.model_is_ready(name, version):
            return plain()
        return plain(error_body("Model version not ready"), 400)


class DescriptionEndpoints:
    """What the server and its models are, and what they have done so far."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    def add_to(self, router: APIRouter) -> None:
        router.add_api_route("/v2", self.server_metadata, methods=["GET"])
        router.add_api_route("/v2/models/stats", self.statistics, methods=["GET"])  # before {name}: Triton's order
        for path in MODEL_PATHS:
            router.add_api_route(path, self.model_metadata, methods=["GET"])
            router.add_api_route(f"{path}/config", self.model_config, methods=["GET"])
            router.add_api_route(f"{path}/stats", self.model_statistics, methods=["GET"])

    async def server_metadata(self, request: Request) -> Response:
        metadata = self._server.server_metadata()
        extensions = list(metadata.extensions)
        return json_response({"name": metadata.name, "version": metadata.version, "extensions": extensions})

    async def model_metadata(self, request: Request) -> Response:
        metadata = self._server.model_metadata(*model_of(request))
        return json_response(
            {
                "name": metadata.name,
                "versions": list(metadata.versions),
                "platform": metadata.platform,
                "inputs": [_tensor_json(tensor) for tensor in metadata.inputs],
                "outputs": [_tensor_json(tensor) for tensor in metadata.outputs],
            }
        )

    async def model_config(self, request: Request) -> Response:
        return json_response(config_to_json(self._server.model_config(*model_of(request))))

    async def statistics(self, request: Request) -> Response:
        return json_response(statistics_to_json(self._server.model_statistics()))

    async def model_statistics(self, request: Request) -> Response:
        return json_response(statistics_to_json(self._server.model_statistics(*model_of(request))))


def _tensor_json(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


class RepositoryEndpoints:
    """The model repository: index, load, unload. A path may name a repository; only the index ignores that."""

    def __init__(self, server: InferenceServer, gate: InferenceGate, max_body_bytes: int) -> None:
        """`max_body_bytes` is for files of a load; other bodies are small."""
        self._server = server
        self._gate = gate
        self._probes = ReadinessProbes(server)
        self._max_body_bytes = max_body_bytes

    def add_to(self, router: APIRouter) -> None:
        for path in ("/v2/repository", "/v2/repository/{repository}"):
            router.add_api_route(f"{path}/index", self.index, methods=["POST"])
            router.add_api_route(f"{path}/models/{{name}}/load", self.load, methods=["POST"])
            router.add_api_route(f"{path}/models/{{name}}/unload", self.unload, methods=["POST"])

    async def index(self, request: Request) -> Response:
        body = await self._body(request)
        ready_only = "ready" in body and as_bool(body["ready"])
        rows = await self._probes.repository_index(ready_only)
        return json_response([_index_json(row) for row in rows])

    async def load(self, request: Request) -> Response:
        name = self._name(request)
        body = await read_body(request, self._max_body_bytes)
        found = await self._gate.parsed(len(body), load_parameters, body)
        parameters = {key: value if isinstance(value, str) else bytes(value) for key, value in found.items()}
        await asyncio.wrap_future(self._server.start_load(name, parameters))
        return plain(content_type=JSON)

    async def unload(self, request: Request) -> Response:
        name = self._name(request)
        parameters = _parameters(await self._body(request))
        dependents = "unload_dependents" in parameters and as_bool(parameters["unload_dependents"])
        await asyncio.to_thread(self._server.unload_model, name, dependents)
        return plain(content_type=JSON)

    def _name(self, request: Request) -> str:
        if "repository" in request.path_params:
            raise unsupported("'repository_name' specification is not supported")
        name: str = request.path_params["name"]
        return name

    async def _body(self, request: Request) -> Mapping[str, Any]:
        return _object(await read_control(request))


def _object(body: bytes) -> Mapping[str, Any]:
    return as_object(parse(body)) if body else {}


def _parameters(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return as_object(document.get("parameters", {}))


def load_parameters(body: bytes) -> dict[str, Any]:
    """The `parameters` of a load request's body; files as PickleBuffers, see `InferenceGate.parsed`."""
    found = dict(_load_parameter(key, value) for key, value in _parameters(_object(body)).items())
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
