"""The network side of a server: HTTP, gRPC and metrics endpoints on one event loop.

For: the command line, tests, and embedding. Does not know: models, signals, processes; whoever holds it stops the
host after it.
Invariants: after `start` every port that was asked for answers, or start raised and none is open; `stop` refuses new
work at once and lets what is running finish within its grace. Nothing here wakes an idle process: uvicorn's main
loop, which ticks ten times a second, is not used (its start and its graceful end are).
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Final

import grpc
import uvicorn
from starlette.types import ASGIApp

from llmbackend.core.inference_server import InferenceServer
from llmbackend.server_log import ServerLog

from .bug_log import with_bugs_logged
from .doors.doors import Doors
from .doors.settings import NO_DOORS
from .doors.tls import TlsFiles
from .http_app import create_http_app
from .http_header_case import CaseKeepingProtocol
from .http_protocol import GuardedProtocol
from .inference import InferenceGate
from .kserve_grpc import create_grpc_server
from .limits import FrontendLimits, HttpLimits
from .metrics_http import create_metrics_app
from .protocol_options import DEFAULT_OPTIONS, ProtocolOptions

_BACKLOG: Final = 2048


class HttpEndpoint:
    """One ASGI app on one listening socket."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: HttpLimits,
        tls: TlsFiles | None = None,
        protocol: type[GuardedProtocol] = GuardedProtocol,
        reuse_port: bool = False,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            with_bugs_logged(app),
            http=partial(protocol, limits),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks for the client's address
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # seconds for call_later
            **({} if tls is None else tls.uvicorn_options()),
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    async def start(self) -> None:
        await self._server.startup(sockets=[self._socket])

    async def stop(self, grace_s: float) -> None:
        """Stops listening, then waits up to `grace_s` for running responses; what still runs then is cancelled."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        await self._server.shutdown(sockets=[self._socket])

    def close(self) -> None:
        """Frees the socket of an endpoint that was never started."""
        self._socket.close()


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
        self._endpoints: list[HttpEndpoint] = []
        self._grpc: grpc.aio.Server | None = None
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self.metrics_port: int | None = None

    async def start(self) -> None:
        """Binds all ports, then opens them. Raises OSError or RuntimeError when one is taken; then none stays open."""
        try:
            await self._bind()
        except BaseException:
            for endpoint in self._endpoints:
                endpoint.close()
            raise
        for endpoint in self._endpoints:
            await endpoint.start()
        if self._grpc is not None:
            await self._grpc.start()

    async def _bind(self) -> None:
        registry = self._server.metrics_registry
        host, port = self._http_at
        if port is not None:
            app = self._http_app or create_http_app(
                self._server, gate=self._gate, options=self._protocols, log=self._log
            )
            guarded = self._doors.around_http(app, registry)
            protocol = CaseKeepingProtocol if self._protocols.http_forward else GuardedProtocol
            self.http_port = self._add_http(guarded, host, port, self._doors.http_tls, protocol, self._http_reuse_port)
        host, port = self._metrics_at
        if port is not None:
            self.metrics_port = self._add_http(create_metrics_app(registry), host, port)
        host, port = self._grpc_at
        if port is not None:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._grpc, self.grpc_port = await create_grpc_server(
                self._server,
                address=address,
                gate=self._gate,
                limits=self._limits.grpc,
                interceptors=self._doors.grpc_interceptors(registry),
                credentials=self._doors.grpc_credentials(),
                protocol=self._protocols,
                log=self._log,
            )

    def _add_http(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: TlsFiles | None = None,
        protocol: type[GuardedProtocol] = GuardedProtocol,
        reuse_port: bool = False,
    ) -> int:
        endpoint = HttpEndpoint(app, host, port, self._limits.http, tls, protocol, reuse_port)
        self._endpoints.append(endpoint)
        return endpoint.port

    async def stop(self, grace_s: float) -> None:
        """Refuses new work, waits up to `grace_s` seconds for what is running, then closes everything. Call it once."""
        stops = [endpoint.stop(grace_s) for endpoint in self._endpoints]
        if self._grpc is not None:
            stops.append(self._grpc.stop(grace_s))
        await asyncio.gather(*stops)
        self._gate.close()
