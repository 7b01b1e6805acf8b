"""grpc.health.v1: readiness for load balancers that speak the standard health protocol.

For: the gRPC server. Does not know: models. Invariants: readiness is asked at most once a second however many watch,
and never when nobody asks; a watcher hears of each change within two seconds.
Source: Triton's Check answers every service name alike (golden 30); Watch, which Triton lacks, is after
grpc/doc/health-checking.md: it says SERVICE_UNKNOWN of an unknown service and stays open.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llmbackend.core.inference_server import InferenceServer

from .readiness_probes import ReadinessProbes

SERVICES: Final = frozenset({"", "inference.GRPCInferenceService"})
_ASK_EVERY_S: Final = 1.0

Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._probes = ReadinessProbes(server)
        self._answer: asyncio.Task[Any] | None = None
        self._asked_at_s = 0.0

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return Status(status=await self._ask())

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Tells the status now and each change of it, until the client cancels or the server stops."""
        if request.service not in SERVICES:
            await context.write(Status(status=Status.SERVICE_UNKNOWN))
            await asyncio.get_running_loop().create_future()  # services do not come and go: until the call ends
        told = None
        while True:
            status = await self._shared_answer()
            if status != told:
                await context.write(Status(status=status))
                told = status
            await asyncio.sleep(_ASK_EVERY_S)

    async def _shared_answer(self) -> Any:
        """The answer of the last second, or a new one that all who watch share."""
        now_s = asyncio.get_running_loop().time()
        if self._answer is None or now_s - self._asked_at_s >= _ASK_EVERY_S:
            self._answer, self._asked_at_s = asyncio.create_task(self._ask()), now_s
        return await asyncio.shield(self._answer)

    async def _ask(self) -> Any:
        ready = not self._server.is_exiting and await self._probes.server_is_ready()
        return Status.SERVING if ready else Status.NOT_SERVING
