"""The RPCs of the shared memory extensions.

For: the gRPC servicer, which has them as a base. Does not know: regions. Source: grpc_service.proto; golden 40.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.memory.shared_memory import MemoryKind

from .grpc_rpc import rpc


class SharedMemoryRpcs:
    _server: InferenceServer

    @rpc
    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._server.shared_memory.status(MemoryKind.SYSTEM, request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    @rpc
    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        self._server.shared_memory.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    @rpc
    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        self._server.shared_memory.unregister(MemoryKind.SYSTEM, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @rpc
    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        self._server.shared_memory.status(MemoryKind.CUDA, request.name)  # there are none: it raises for a name
        return pb.CudaSharedMemoryStatusResponse()

    @rpc
    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        self._server.shared_memory.register_cuda(request.name, request.raw_handle, request.byte_size, request.device_id)
        return pb.CudaSharedMemoryRegisterResponse()

    @rpc
    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        self._server.shared_memory.unregister(MemoryKind.CUDA, request.name)
        return pb.CudaSharedMemoryUnregisterResponse()
