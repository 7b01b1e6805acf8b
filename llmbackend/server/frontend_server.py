"""The network side of a server: HTTP, gRPC and metrics endpoints on one event loop.

For: the command line, tests, and embedding. Does not know: models, signals, processes; the caller stops the host after
it. Invariants: after `bind` this process has every port that was asked for, after `start` they answer, and where one of
the two raises none is open. `stop` refuses new work at once and lets running work finish within its grace.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
from starlette.types import ASGIApp

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog

from ..frontends.access.access_control import AccessControl
from ..frontends.access.settings import NO_ACCESS_CONTROL
from ..frontends.grpc.server import create_grpc_server
from ..frontends.http.endpoint import HttpEndpoint
from ..frontends.http.protocol import CaseKeepingProtocol, GuardedProtocol
from ..frontends.http_app import create_http_app, with_cors
from ..frontends.inference_gate import InferenceGate
from ..frontends.limits import FrontendLimits, GrpcLimits
from ..frontends.operations.metrics import create_metrics_app
from ..frontends.protocol_options import DEFAULT_OPTIONS, ProtocolOptions
from .descriptor_room import DescriptorRoom, fitted
from .ports import ClaimedPorts, PortWish


class FrontendServer:
    """The endpoints around one InferenceServer. A port of None switches its endpoint off, 0 takes any free port.

    `access` is checked before HTTP and gRPC; the metrics port is open. `gate`, `protocols` and `log` are
    those that `http_app` uses. `claims`: the ports, where they have been bound before.
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
        access: AccessControl | None = None,
        gate: InferenceGate | None = None,
        limits: FrontendLimits | None = None,
        protocols: ProtocolOptions | None = None,
        log: ServerLog | None = None,
        claims: ClaimedPorts | None = None,
    ) -> None:
        self._server = server
        self._http_app = http_app
        self._access = access or AccessControl(NO_ACCESS_CONTROL)
        self._limits = limits or FrontendLimits()
        self._gate = gate or InferenceGate(server, self._limits.inference)
        self._protocols = protocols or DEFAULT_OPTIONS
        self._log = log or ServerLog()
        self._grpc_at = (grpc_address, grpc_port)
        self._wishes = {
            "http": PortWish(http_address, http_port, http_reuse_port),
            "metrics": PortWish(metrics_address, metrics_port),
            "grpc": PortWish(grpc_address, grpc_port, self._protocols.grpc_reuse_port),
        }
        self._claims = claims
        self._is_bound = False
        self._http: HttpEndpoint | None = None
        self._metrics: HttpEndpoint | None = None
        self._grpc: grpc.aio.Server | None = None
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self.metrics_port: int | None = None

    def bind(self) -> None:
        """Binds all ports without listening, so that a port of another process is found before anything is loaded.
        Raises OSError; then no port is kept."""
        self._claims = self._claims or ClaimedPorts.claim(**self._wishes)
        self._is_bound = True
        try:
            self._make_endpoints(self._claims)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives back the ports of a server that was not started."""
        if self._claims is not None:
            self._claims.close()

    def _make_endpoints(self, claims: ClaimedPorts) -> None:
        registry = self._server.metrics_registry
        if claims.http is not None:
            app = self._http_app or create_http_app(
                self._server, gate=self._gate, options=self._protocols, log=self._log
            )
            guarded = with_cors(self._access.around_http(app, registry), self._protocols.cors)
            self._http = HttpEndpoint(guarded, claims.http, self._access.http_tls_context)
            self.http_port = self._http.port
        if claims.metrics is not None:
            self._metrics = HttpEndpoint(create_metrics_app(registry), claims.metrics, lambda: None)
            self.metrics_port = self._metrics.port

    async def start(self) -> None:
        """Listens on all ports, which it binds where `bind` was not called, for as many connections as there are
        descriptors for. Raises OSError or RuntimeError when a port is taken; then none stays open."""
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
        if self._claims is not None and self._claims.grpc is not None:
            self._claims.grpc.close()  # gRPC binds by itself
        registry = self._server.metrics_registry
        self._grpc, self.grpc_port = await create_grpc_server(
            self._server,
            address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            gate=self._gate,
            limits=limits,
            interceptors=self._access.grpc_interceptors(registry),
            credentials=self._access.grpc_credentials(),
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
        self._gate.close()
        self.close()
