"""KServe v2 over gRPC: the RPCs of inference.GRPCInferenceService.

For: the gRPC server. Does not know: backends, regions of shared memory, what settings do. Invariants: an RPC that
is not implemented says so by name; a cancelled RPC, or one past its deadline, cancels its request; the response to a
change of settings is the settings after it.
Source: grpc_service.proto (from tritonclient) and Triton's grpc_server, as recorded from Triton 2.51; golden 40.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.errors import invalid_argument, unsupported
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog
from llmbackend.core.shared_memory import MemoryKind

from ..inference_gate import InferenceGate
from ..journals.resumable_streams import ResumableStreams
from ..operations.settings import (
    log_changes_from_proto,
    shown_log_settings,
    shown_trace_settings,
    trace_changes_from_proto,
    updated_trace_settings,
)
from ..protocol_options import ProtocolOptions
from .codec import model_version
from .inference_rpcs import InferenceRpcs
from .rpc import Context, rpc


class InferenceServicer(InferenceRpcs):
    """Every RPC of inference.GRPCInferenceService that this server has."""

    def __init__(
        self,
        server: InferenceServer,
        gate: InferenceGate,
        write_timeout_s: float,
        protocol: ProtocolOptions,
        log: ServerLog | None,
        streams: ResumableStreams,
    ) -> None:
        super().__init__(server, gate, write_timeout_s, protocol, streams)
        self._server: InferenceServer = server
        self._log = log or ServerLog()

    @rpc
    async def ModelConfig(self, request: Any, context: Context) -> Any:
        return pb.ModelConfigResponse(config=self._server.model_config(request.name, model_version(request.version)))

    @rpc
    async def ModelStatistics(self, request: Any, context: Context) -> Any:
        version = model_version(request.version)
        return pb.ModelStatisticsResponse(model_stats=self._server.model_statistics(request.name, version))

    @rpc
    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        rows = await self._probes.repository_index(request.ready)
        response = pb.RepositoryIndexResponse()
        for row in rows:
            response.models.add(name=row.name, version=row.version, state=row.state, reason=row.reason)
        return response

    @rpc
    async def RepositoryModelLoad(self, request: Any, context: Context) -> Any:
        _refuse_named_repository(request)
        parameters = {key: _load_parameter(key, value) for key, value in request.parameters.items()}
        await asyncio.wrap_future(self._server.start_load(request.model_name, parameters))
        return pb.RepositoryModelLoadResponse()

    @rpc
    async def RepositoryModelUnload(self, request: Any, context: Context) -> Any:
        _refuse_named_repository(request)
        dependents = request.parameters["unload_dependents"].bool_param
        await asyncio.to_thread(self._server.unload_model, request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    @rpc
    async def TraceSetting(self, request: Any, context: Context) -> Any:
        changes = partial(trace_changes_from_proto, request.settings) if request.settings else None
        settings = await asyncio.to_thread(updated_trace_settings, self._server, request.model_name, changes)
        response = pb.TraceSettingResponse()
        for key, values in shown_trace_settings(settings).items():
            response.settings[key].value.extend(values)
        return response

    @rpc
    async def LogSettings(self, request: Any, context: Context) -> Any:
        if request.settings:
            self._log.update(**log_changes_from_proto(request.settings))
        response = pb.LogSettingsResponse()
        for key, value in shown_log_settings(self._log.settings).items():
            if isinstance(value, bool):
                response.settings[key].bool_param = value
            elif isinstance(value, int):
                response.settings[key].uint32_param = value
            else:
                response.settings[key].string_param = value
        return response

    @rpc
    async def SystemSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._server.shared_memory.status(MemoryKind.SYSTEM, request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    @rpc
    async def SystemSharedMemoryRegister(self, request: Any, context: Context) -> Any:
        self._server.shared_memory.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    @rpc
    async def SystemSharedMemoryUnregister(self, request: Any, context: Context) -> Any:
        self._server.shared_memory.unregister(MemoryKind.SYSTEM, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @rpc
    async def CudaSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        self._server.shared_memory.status(MemoryKind.CUDA, request.name)  # there are none: it raises for a name
        return pb.CudaSharedMemoryStatusResponse()

    @rpc
    async def CudaSharedMemoryRegister(self, request: Any, context: Context) -> Any:
        self._server.shared_memory.register_cuda(request.name, request.raw_handle, request.byte_size, request.device_id)
        return pb.CudaSharedMemoryRegisterResponse()

    @rpc
    async def CudaSharedMemoryUnregister(self, request: Any, context: Context) -> Any:
        self._server.shared_memory.unregister(MemoryKind.CUDA, request.name)
        return pb.CudaSharedMemoryUnregisterResponse()


def _refuse_named_repository(request: Any) -> None:
    if request.repository_name:
        raise unsupported("'repository_name' specification is not supported")


def _load_parameter(key: str, parameter: Any) -> str | bytes:
    """The value of a load parameter: `config` is a string, `file:<path>` bytes; INVALID_ARG for anything else."""
    if key == "config":
        expected = "string_param"
    elif key.startswith("file:"):
        expected = "bytes_param"
    else:
        raise invalid_argument(f"unrecognized load parameter '{key}'")
    if parameter.WhichOneof("parameter_choice") != expected:
        raise invalid_argument(f"invalid value type for load parameter '{key}', expected {expected}.")
    value: str | bytes = getattr(parameter, expected)
    return value
