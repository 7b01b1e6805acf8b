"""KServe v2 over gRPC: whether the server and its models are ready, and what they are.

For: the gRPC server, of a host and of a frontend process. Does not know: backends, in which process the host is.
Invariant: nothing here blocks the event loop; a backend's readiness, which may take long, is asked on a thread.
Source: grpc_service.proto (from tritonclient) and Triton's grpc_server, as recorded from Triton 2.51.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.errors import unavailable
from llmbackend.core.host_protocol import Host
from llmbackend.core.messages import TensorMetadata

from ..operations.probes import ReadinessProbes
from .codec import model_version
from .rpc import Context, rpc


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
