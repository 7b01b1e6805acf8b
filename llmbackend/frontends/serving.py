"""The network side of a server: HTTP, gRPC and metrics endpoints on one event loop.

For: the command line, tests, and embedding. Does not know: models, signals, processes; whoever holds it stops the
host after it.
Invariants: after `bind` every port that was asked for is this process's, after `start` it answers, and where one raises
none is open; `stop` refuses new work at once and lets what is running finish within its grace.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import grpc
from starlette.types import ASGIApp

from llmbackend.core.inference_server import InferenceServer
from llmbackend.server_log import ServerLog

from . import cors
from .descriptors import DescriptorRoom, fitted
from .doors.doors import Doors
from .doors.settings import NO_DOORS
from .http_app import create_http_app
from .http_endpoint import HttpEndpoint, claimed_port
from .http_header_case import CaseKeepingProtocol
from .http_protocol import GuardedProtocol
from .inference import InferenceGate
from .kserve_grpc import create_grpc_server
from .limits import FrontendLimits, GrpcLimits
from .metrics_http import create_metrics_app
from .protocol_options import DEFAULT_OPTIONS, ProtocolOptions


class FrontendServer:
    """The endpoints around one InferenceServer. A port of None switches its endpoint off, 0 takes any free port.

    `doors` stand before HTTP and gRPC; the metrics port has none. `gate`, `protocols` and `log` are
    those that `http_app` uses.
    """

    def __init__(
        self,
        server: InferenceServer,
        *,
        http_address: str = "127.0.0.1",
        http_port: int | None = 8000,
        grpc_address: str = "127.0.0.1",
        grpc_port: int | None = 8001,
        metrics_address: str = "127.0.0.1",
        metrics_port: int | None = 8002,
        http_reuse_port: bool = False,
        http_app: ASGIApp | None = None,
        doors: Doors | None = None,
        gate: InferenceGate | None = None,
        limits: FrontendLimits | None = None,
        protocols: ProtocolOptions | None = None,
        log: ServerLog | None = None,
    ) -> None:
        self._server = server
        self._http_app = http_app
        self._doors = doors or Doors(NO_DOORS)
        self._limits = limits or FrontendLimits()
        self._gate = gate or InferenceGate(server, self._limits.inference)
        self._protocols = protocols or DEFAULT_OPTIONS
        self._log = log or ServerLog()
        self._http_at = (http_address, http_port)
        self._grpc_at = (grpc_address, grpc_port)
        self._metrics_at = (metrics_address, metrics_port)
        self._http_reuse_port = http_reuse_port
        self._is_bound = False
        self._http: HttpEndpoint | None = None
        self._metrics: HttpEndpoint | None = None
        self._grpc_claim: socket.socket | None = None
        self._grpc: grpc.aio.Server | None = None
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self.metrics_port: int | None = None

    def bind(self) -> None:
        """Takes all ports, and opens none: what another process has is known before anything is loaded. Raises
        OSError; then none is kept."""
        self._is_bound = True
        try:
            self._bind()
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        registry = self._server.metrics_registry
        host, port = self._http_at
        if port is not None:
            app = self._http_app or create_http_app(
                self._server, gate=self._gate, options=self._protocols, log=self._log
            )
            claim = claimed_port(host, port, self._http_reuse_port)
            guarded = cors.around(self._doors.around_http(app, registry), self._protocols.cors)
            self._http = HttpEndpoint(guarded, claim, self._doors.http_tls_context)
            self.http_port = self._http.port
        host, port = self._metrics_at
        if port is not None:
            claim = claimed_port(host, port, False)
            self._metrics = HttpEndpoint(create_metrics_app(registry), claim, lambda: None)
            self.metrics_port = self._metrics.port
        host, port = self._grpc_at
        if port:
            self._grpc_claim = claimed_port(host, port, self._protocols.grpc_reuse_port)

    def close(self) -> None:
        """Gives back the ports of a server that was not started."""
        for endpoint in (self._http, self._metrics, self._grpc_claim):
            if endpoint is not None:
                endpoint.close()
        self._http = self._metrics = self._grpc_claim = None

    async def start(self) -> None:
        """Opens all ports, after `bind` where that was not called, for as many connections as there are descriptors
        for. Raises OSError or RuntimeError when one is taken; then none stays open."""
        if not self._is_bound:
            self.bind()
        room = DescriptorRoom.now()
        limits = fitted(self._limits, room)
        protocol = CaseKeepingProtocol if self._protocols.http_forward else GuardedProtocol
        metrics_limits = replace(limits.http, max_connections=limits.metrics_max_connections)
        try:
            if self._http is not None:
                await self._http.start(limits.http, protocol, room.first_reserved)
            if self._metrics is not None:
                await self._metrics.start(metrics_limits, GuardedProtocol, room.first_reserved)
            await self._start_grpc(limits.grpc)
        except BaseException:
            await self.stop(grace_s=0)
            raise

    async def _start_grpc(self, limits: GrpcLimits) -> None:
        host, port = self._grpc_at
        if port is None:
            return
        if self._grpc_claim is not None:  # gRPC binds by itself
            self._grpc_claim.close()
            self._grpc_claim = None
        registry = self._server.metrics_registry
        self._grpc, self.grpc_port = await create_grpc_server(
            self._server,
            address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            gate=self._gate,
            limits=limits,
            interceptors=self._doors.grpc_interceptors(registry),
            credentials=self._doors.grpc_credentials(),
            protocol=self._protocols,
            log=self._log,
        )
        await self._grpc.start()

    async def stop(self, grace_s: float) -> None:
        """Refuses new work, waits up to `grace_s` seconds for what is running, then closes everything. Call it once."""
        stops = [endpoint.stop(grace_s) for endpoint in (self._http, self._metrics) if endpoint is not None]
        if self._grpc is not None:
            stops.append(self._grpc.stop(grace_s))
        await asyncio.gather(*stops)
        if self._grpc_claim is not None:
            self._grpc_claim.close()
