"""KServe v2 over gRPC: inference, and what the server and its models are; in a host and in a frontend process.

Invariants: nothing here blocks the event loop; a cancelled RPC, or one past its deadline, cancels its request.
Source: grpc_service.proto (from tritonclient) and Triton's grpc_server, as recorded from Triton 2.51.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.errors import unavailable, unsupported
from llmbackend.core.host_protocol import Host
from llmbackend.core.messages import TensorMetadata

from ..inference_gate import LARGE_BODY_BYTES, InferenceGate
from ..journals.resumable_streams import ResumableStreams
from ..kserve.infer_codec import single_response
from ..kserve.request_parameters import options_from_proto
from ..operations.probes import ReadinessProbes
from ..protocol_options import ProtocolOptions
from .codec import decode_request, model_version, response_parts
from .messages import opened
from .rpc import Context, close_when_sent, name_trace, rpc, sampled
from .stream import StreamSession


class DescriptionRpcs(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, server: Host) -> None:
        self._server = server
        self._probes = ReadinessProbes(server)

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


def _tensor_metadata(tensor: TensorMetadata) -> Any:
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


_COMPRESSION: Final = {
    "none": None,
    "low": grpc.Compression.Gzip,
    "medium": grpc.Compression.Deflate,
    "high": grpc.Compression.Deflate,
}
"""As gRPC's core chooses by level for a client that accepts both algorithms; Python's API has no levels."""


class InferenceRpcs(DescriptionRpcs):
    def __init__(
        self,
        server: Host,
        gate: InferenceGate,
        write_timeout_s: float,
        protocol: ProtocolOptions,
        streams: ResumableStreams | None,
    ) -> None:
        """streams: of requests that a client can come back to; None: they are another process's."""
        super().__init__(server)
        self._streams = streams
        self._gate = gate
        self._write_timeout_s = write_timeout_s
        self._forward = protocol.grpc_forward
        self._compression = _COMPRESSION[protocol.grpc_response_compression]

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
                await name_trace(trace, context)  # a host in another process has named it by now
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
    """A large message is joined in a thread, where Python holds no lock while it copies."""
    if sum(map(len, parts)) <= LARGE_BODY_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)
