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
from llmbackend.core.messages import TensorMetadata

from ..http.errors import error_body, error_response
from ..http.responses import TEXT, json_response, plain
from ..http.routing import Router
from ..operations.probes import ReadinessProbes
from .model_paths import MODEL_PATHS, model_of

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


class HealthEndpoints:
    """Liveness and readiness: 200 or 400, without a body."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._probes = ReadinessProbes(server)

    def add_to(self, router: Router) -> None:
        router.add_handler("/v2/health/live", self.live, methods=["GET"])
        router.add_handler("/v2/health/ready", self.ready, methods=["GET"])
        for path in MODEL_PATHS:
            router.add_handler(f"{path}/ready", self.model_ready, methods=["GET"])

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


class MetadataEndpoints:
    """What the server and its models are."""

    def __init__(self, server: Host) -> None:
        self._server = server

    def add_to(self, router: Router) -> None:
        router.add_handler("/v2", self.server_metadata, methods=["GET"])
        for path in MODEL_PATHS:
            router.add_handler(path, self.model_metadata, methods=["GET"])

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


class DescriptionEndpoints:
    """Configuration and statistics. To be added before MetadataEndpoints: Triton's order."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    def add_to(self, router: Router) -> None:
        router.add_handler("/v2/models/stats", self.statistics, methods=["GET"])
        for path in MODEL_PATHS:
            router.add_handler(f"{path}/config", self.model_config, methods=["GET"])
            router.add_handler(f"{path}/stats", self.model_statistics, methods=["GET"])

    async def model_config(self, request: Request) -> Response:
        return json_response(config_to_json(self._server.model_config(*model_of(request))))

    async def statistics(self, request: Request) -> Response:
        return json_response(statistics_to_json(self._server.model_statistics()))

    async def model_statistics(self, request: Request) -> Response:
        return json_response(statistics_to_json(self._server.model_statistics(*model_of(request))))


def _tensor_json(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def statistics_to_json(models: Iterable[ModelStatistics]) -> dict[str, Any]:
    """Every field is present, also those that are 0."""
    return {"model_stats": [_model(model) for model in models]}


def _model(model: Any) -> dict[str, Any]:
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


def _durations(message: Any, names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    return {name: {"count": getattr(message, name).count, "ns": getattr(message, name).ns} for name in names}
