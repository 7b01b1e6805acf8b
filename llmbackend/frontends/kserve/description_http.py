"""KServe v2 over HTTP: health, and what the server and its models are: metadata, configuration, statistics.

For: the HTTP application. Does not know: backends, inference. Invariant: nothing here blocks the event loop; a
backend's readiness, which may take long, is asked on a thread.
Source: KServe v2 and Triton's statistics extension; bodies and the order of their keys as recorded from Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from tritonclient.grpc.service_pb2 import ModelStatistics

from llmbackend.core.config.model_config import config_to_json
from llmbackend.core.errors import unavailable
from llmbackend.core.host_protocol import Host
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ServerMetadata

from ..http.errors import error_body, error_response
from ..http.responses import TEXT, plain
from ..http.routing import Endpoints, get
from ..operations.probes import ReadinessProbes
from . import http_types
from .model_paths import model_of, model_paths

_INFER: Final = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
_BATCH: Final = ("compute_input", "compute_infer", "compute_output")
_RESPONSE: Final = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


class HealthEndpoints(Endpoints):
    """Liveness and readiness: 200 or 400, without a body."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._probes = ReadinessProbes(server)

    @get("/v2/health/live", response_class=Response)
    async def live(self, request: Request) -> Response:
        """Is the server alive?"""
        if self._server.is_exiting:
            return error_response(unavailable("Server exiting"), TEXT)
        return plain(status=200 if self._server.is_live() else 400)

    @get("/v2/health/ready", response_class=Response)
    async def ready(self, request: Request) -> Response:
        """Does the server take work? Under strict readiness: is every model ready?"""
        if self._server.is_exiting:
            return error_response(unavailable("Server exiting"), TEXT)
        return plain(status=200 if await self._probes.server_is_ready() else 400)

    @get(*model_paths("/ready"), response_class=Response)
    async def model_ready(self, request: Request) -> Response:
        """Is the model ready?"""
        name, version = model_of(request)
        if await self._probes.model_is_ready(name, version):
            return plain()
        return plain(error_body("Model version not ready"), 400)


class MetadataEndpoints(Endpoints):
    """What the server and its models are."""

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
    """Configuration and statistics. To be added before MetadataEndpoints: Triton's order."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    @get("/v2/models/stats")
    async def statistics(self, request: Request) -> http_types.Statistics:
        """Statistics of every model"""
        return statistics_to_json(self._server.model_statistics())

    @get(*model_paths("/stats"))
    async def model_statistics(self, request: Request) -> http_types.Statistics:
        """Statistics of one model"""
        return statistics_to_json(self._server.model_statistics(*model_of(request)))

    @get(*model_paths("/config"), answer=http_types.ModelConfig)
    async def model_config(self, request: Request) -> dict[str, Any]:
        """The model's configuration, completed"""
        return config_to_json(self._server.model_config(*model_of(request)))


def statistics_to_json(models: Iterable[ModelStatistics]) -> http_types.Statistics:
    """Every field is present, also those that are 0."""
    return {"model_stats": [_model(model) for model in models]}


def _model(model: Any) -> http_types.ModelStatistics:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": _durations(model.inference_stats, _INFER),
        "response_stats": {
            key: _durations(model.response_stats[key], _RESPONSE) for key in sorted(model.response_stats)
        },
        "batch_stats": [{"batch_size": row.batch_size} | _durations(row, _BATCH) for row in model.batch_stats],
        "memory_usage": [{"type": row.type, "id": row.id, "byte_size": row.byte_size} for row in model.memory_usage],
    }


def _durations(message: Any, names: tuple[str, ...]) -> dict[str, http_types.Duration]:
    return {name: {"count": getattr(message, name).count, "ns": getattr(message, name).ns} for name in names}
