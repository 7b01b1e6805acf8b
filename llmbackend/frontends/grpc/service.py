"""The RPCs of inference.GRPCInferenceService (KServe v2), in a host and in a frontend process.

Invariants: nothing here blocks the event loop; an RPC that is cancelled or exceeds its deadline cancels its request;
the response to a change of settings contains the settings after it. Sources: grpc_service.proto (from tritonclient) and
Triton's grpc_server, recorded from Triton 2.51; golden 40.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.errors import invalid_argument, unavailable, unsupported
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import TensorMetadata
from llmbackend.core.shared_memory import MemoryKind

from ..context import FrontendContext
from ..inference_gate import LARGE_BODY_BYTES
from ..journals.resumable_streams import ResumableStreams
from ..kserve.infer_codec import single_response
from ..kserve.request_parameters import options_from_proto
from ..operations.settings import (
    log_changes_from_proto,
    shown_log_settings,
    shown_trace_settings,
    trace_changes_from_proto,
    updated_trace_settings,
)
from .codec import decode_request, model_version, response_parts
from .messages import opened
from .rpc import Context, close_when_sent, name_trace, rpc, sampled
from .stream import StreamSession


class DescriptionRpcs(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, context: FrontendContext) -> None:
        self._server = context.server
        self._gate = context.gate

    @rpc
    async def ServerLive(self, request: Any, context: Context) -> Any:
        self._refuse_when_exiting()
        return pb.ServerLiveResponse(live=self._server.is_live())

    @rpc
    async def ServerReady(self, request: Any, context: Context) -> Any:
        self._refuse_when_exiting()
        return pb.ServerReadyResponse(ready=await self._gate.readiness.server_is_ready())

    def _refuse_when_exiting(self) -> None:
        if self._server.is_exiting:
            raise unavailable("Server exiting")

    @rpc
    async def ModelReady(self, request: Any, context: Context) -> Any:
        version = model_version(request.version)
        return pb.ModelReadyResponse(ready=await self._gate.readiness.model_is_ready(request.name, version))

    @rpc
    async def ServerMetadata(self, request: Any, context: Context) -> Any:
        metadata = self._server.server_metadata()
        return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)

    @rpc
    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        metadata = self._server.model_metadata(request.name, model_version(request.version))
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=map(_tensor_metadata, metadata.inputs),
            outputs=map(_tensor_metadata, metadata.outputs),
        )


def _tensor_metadata(tensor: TensorMetadata) -> Any:
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


_COMPRESSION: Final = {
    "none": None,
    "low": grpc.Compression.Gzip,
    "medium": grpc.Compression.Deflate,
    "high": grpc.Compression.Deflate,
}
"""What gRPC's core chooses at each level for a client that accepts both algorithms. The Python API has no levels."""


class InferenceRpcs(DescriptionRpcs):
    _streams: ResumableStreams | None = None
    """Those of resumable requests; None if another process has them."""

    def __init__(self, context: FrontendContext, write_timeout_s: float) -> None:
        super().__init__(context)
        self._write_timeout_s = write_timeout_s
        self._forward = context.options.grpc_forward
        self._compression = _COMPRESSION[context.options.grpc_response_compression]

    @rpc
    async def ModelInfer(self, request: Any, context: Context) -> Any:
        open_request = await opened(request, self._gate)
        request = open_request.message
        if self._server.is_decoupled(request.model_name, model_version(request.model_version)):
            raise unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        self._set_compression(context)
        trace = sampled(self._server, request.model_name, context)
        if trace is not None:
            close_when_sent(trace, context)
        options = options_from_proto(request.parameters)
        if self._forward:
            options = self._forward.into(options, context.invocation_metadata())
        given = await self._gate.with_shared_inputs(decode_request(open_request, options))
        inference = await self._gate.send(given, trace=trace)
        try:
            if trace is not None:
                await name_trace(trace, context)  # by now, a host in another process has named it
            response = single_response(await inference.collect(at_most=2))
        finally:
            inference.close()
        message = await _joined(response_parts(response, given.shared_outputs))
        if trace is not None:
            trace.mark("GRPC_SEND_START")
        return message

    async def ModelStreamInfer(self, requests: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        self._set_compression(context)
        await StreamSession(self._gate, context, self._write_timeout_s, self._forward, self._streams).run(requests)

    def _set_compression(self, context: Context) -> None:
        if self._compression is not None:
            context.set_compression(self._compression)


async def _joined(parts: Sequence[bytes | memoryview]) -> bytes:
    """Joins a large message in a thread, where copying does not hold the GIL."""
    if sum(map(len, parts)) <= LARGE_BODY_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)


class InferenceServicer(InferenceRpcs):
    """For a host in this process."""

    _server: InferenceServer

    def __init__(self, context: FrontendContext, write_timeout_s: float) -> None:
        super().__init__(context, write_timeout_s)
        self._streams = context.streams
        self._log = context.log

    @rpc
    async def ModelConfig(self, request: Any, context: Context) -> Any:
        return pb.ModelConfigResponse(config=self._server.model_config(request.name, model_version(request.version)))

    @rpc
    async def ModelStatistics(self, request: Any, context: Context) -> Any:
        version = model_version(request.version)
        rows = await asyncio.to_thread(self._server.model_statistics, request.name, version)
        return pb.ModelStatisticsResponse(model_stats=rows)

    @rpc
    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        _refuse_named_repository(request)
        rows = await self._gate.readiness.repository_index(request.ready)
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
        await asyncio.to_thread(self._server.unload_model, request.model_name, _unloads_dependents(request))
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
        # no CUDA regions exist, so this raises if a name is given
        self._server.shared_memory.status(MemoryKind.CUDA, request.name)
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


def _unloads_dependents(request: Any) -> bool:
    """Raises TritonError INVALID_ARG for a parameter of another type."""
    if "unload_dependents" not in request.parameters:
        return False
    parameter = request.parameters["unload_dependents"]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise invalid_argument("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    return bool(parameter.bool_param)


def _load_parameter(key: str, parameter: Any) -> str | bytes:
    """A string for `config`, bytes for `file:<path>`. Raises TritonError INVALID_ARG for anything else."""
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
