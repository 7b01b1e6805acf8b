"""KServe v2 over gRPC: the GRPCInferenceService, and the server that has it and the health service.

For: the frontend server. Does not know: backends. Invariants: a TritonError ends its RPC with the status of its code
and its text unchanged; an RPC that is not built says so by name; a cancelled RPC, or one past its deadline, cancels
its request.
Source: grpc_service.proto (from tritonclient) and Triton's grpc_server, as recorded from Triton 2.51.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.errors import invalid_argument, unavailable, unsupported
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import TensorMetadata, nobody
from llmbackend.server_log import ServerLog

from .grpc_codec import decode_request, fill_response, model_version
from .grpc_health import HealthServicer
from .grpc_malformed import TolerantServices
from .grpc_request import opened, parse_or_keep
from .grpc_rpc import rpc
from .grpc_stream import Context, StreamSession
from .grpc_tracing import close_when_sent, sampled
from .infer_codec import single_response
from .inference import InferenceGate
from .limits import GrpcLimits
from .protocol_options import DEFAULT_OPTIONS, ProtocolOptions
from .readiness_probes import ReadinessProbes
from .request_parameters import options_from_proto
from .settings_grpc import log_setting, trace_setting
from .shared_memory_grpc import SharedMemoryRpcs

INT32_MAX: Final = (1 << 31) - 1
_LARGE_MESSAGES: Final = {
    "ModelInfer": parse_or_keep,
    "ModelStreamInfer": parse_or_keep,
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest.FromString,
}
_COMPRESSION: Final = {
    "none": None,
    "low": grpc.Compression.Gzip,
    "medium": grpc.Compression.Deflate,
    "high": grpc.Compression.Deflate,
}
"""gRPC's core chooses so for a client that takes both; Python names algorithms, not levels."""


async def create_grpc_server(
    server: InferenceServer,
    *,
    address: str,
    options: Sequence[tuple[str, Any]] = (),
    gate: InferenceGate | None = None,
    limits: GrpcLimits | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    credentials: grpc.ServerCredentials | None = None,
    protocol: ProtocolOptions | None = None,
    log: ServerLog | None = None,
) -> tuple[grpc.aio.Server, int]:
    """A server for `server` on `address` ("host:port", port 0 = any), not yet started, and the port it is bound to.

    `options` are gRPC channel arguments, after those of `limits`; `gate` is the one that other frontends of `server`
    use; `interceptors` see an RPC before anything else does; with `credentials` the port speaks TLS; `log` is
    the process's log that LogSettings sets. To be awaited on the event loop that will run the server. Raises
    RuntimeError when the address can not be bound.
    """
    limits, protocol = limits or GrpcLimits(), protocol or DEFAULT_OPTIONS
    arguments = [
        ("grpc.max_send_message_length", INT32_MAX),
        ("grpc.so_reuseport", int(protocol.grpc_reuse_port)),
        *limits.channel_arguments(),
    ]
    grpc_server = grpc.aio.server(interceptors=list(interceptors), options=[*arguments, *options])
    servicer = InferenceServicer(server, gate or InferenceGate(server), limits.write_timeout_s, protocol, log)
    services = TolerantServices(grpc_server, _LARGE_MESSAGES)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, services)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(server), services)
    try:
        if credentials is not None:
            return grpc_server, grpc_server.add_secure_port(address, credentials)
        return grpc_server, grpc_server.add_insecure_port(address)
    except RuntimeError:
        await grpc_server.start()  # gRPC gives back what a server holds (descriptors, threads) only if it was started
        await grpc_server.stop(None)
        raise


class InferenceServicer(SharedMemoryRpcs, service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(
        self,
        server: InferenceServer,
        gate: InferenceGate,
        write_timeout_s: float,
        protocol: ProtocolOptions,
        log: ServerLog | None,
    ) -> None:
        self._server = server
        self._probes = ReadinessProbes(server)
        self._gate = gate
        self._write_timeout_s = write_timeout_s
        self._forward = protocol.grpc_forward
        self._compression = _COMPRESSION[protocol.grpc_response_compression]
        self._log = log or ServerLog()

    @rpc
    async def ServerLive(self, request: Any, context: Context) -> Any:
        self._refuse_when_exiting()
        return pb.ServerLiveResponse(live=self._server.is_live())

    @rpc
    async def ServerReady(self, request: Any, context: Context) -> Any:
        self._refuse_when_exiting()
        return pb.ServerReadyResponse(ready=await self._probes.server_is_ready())

    def _refuse_when_exiting(self) -> None:
        if self._server.is_exiting:
            raise unavailable("Server exiting")

    @rpc
    async def ModelReady(self, request: Any, context: Context) -> Any:
        version = model_version(request.version)
        return pb.ModelReadyResponse(ready=await self._probes.model_is_ready(request.name, version))

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
    async def ModelInfer(self, request: Any, context: Context) -> Any:
        asked = await opened(request, self._gate)
        request = asked.message
        if self._server.is_decoupled(request.model_name, model_version(request.model_version)):
            raise unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        self._set_compression(context)
        trace = sampled(self._server, request.model_name, context)
        if trace is not None:
            close_when_sent(trace, context)
        options = options_from_proto(request.parameters)
        if self._forward:
            options = self._forward.into(options, context.invocation_metadata())
        given = await self._gate.with_shared_inputs(decode_request(asked, options, nobody))
        inference = await self._gate.send(given, trace=trace)
        try:
            response = single_response(await inference.collect(at_most=2))
        finally:
            inference.close()
        message = pb.ModelInferResponse()
        fill_response(message, response, given.output_places)
        if trace is not None:
            trace.mark("GRPC_SEND_START")
        return message

    async def ModelStreamInfer(self, requests: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        self._set_compression(context)
        await StreamSession(self._gate, context, self._write_timeout_s, self._forward).run(requests)

    def _set_compression(self, context: Context) -> None:
        if self._compression is not None:
            context.set_compression(self._compression)

    @rpc
    async def TraceSetting(self, request: Any, context: Context) -> Any:
        return await trace_setting(self._server, request)

    @rpc
    async def LogSettings(self, request: Any, context: Context) -> Any:
        return log_setting(self._log, request)


def _tensor_metadata(tensor: TensorMetadata) -> Any:
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


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
