"""FrontendServer: the HTTP, gRPC and metrics endpoints of a server, on one event loop.

Used by servers and tests. Independent of models, signals and processes; the caller stops the host afterwards.
Invariants: `bind` claims all ports, and after `start` they answer; if either raises, no port stays open. `stop` refuses
new work immediately and lets running work finish within its grace period.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, cast

from grpc.aio import Server as GrpcServer
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from starlette.types import ASGIApp

from llmbackend.core.host_protocol import Host
from llmbackend.frontends.access.settings import is_local
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.grpc import resumable
from llmbackend.frontends.grpc.server import check_threads, create_grpc_server
from llmbackend.frontends.http.endpoint import HttpEndpoint
from llmbackend.frontends.http.protocol import CaseKeepingProtocol, GuardedProtocol
from llmbackend.frontends.http.routing import with_routed_paths
from llmbackend.frontends.http.site_check import SiteCheck
from llmbackend.frontends.http_app import with_cors, with_middleware, with_request_ids
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.resumable_streams import ResumableStreams, regenerate
from llmbackend.frontends.journals.stream_copies import Peers, StreamCopies
from llmbackend.frontends.limits import GrpcLimits
from llmbackend.frontends.operations.probes import create_metrics_app
from llmbackend.frontends.protocol_options import NO_PAGES, PageSettings
from llmbackend.frontends.shared_counts import Counts

from .ports import UNIX, ClaimedPorts, Endpoint, in_url
from .process import DescriptorRoom, fitted

if TYPE_CHECKING:
    from llmbackend.frontends.host_forwarding import Edge
    from llmbackend.frontends.http.tunnel import Tunnels
    from llmbackend.frontends.page_proxy import PageProxy


STREAMS_COPIED: Final = "llmbackend:resumable_streams_copied"


def copy_streams(
    streams: ResumableStreams, app: ASGIApp, gate: InferenceGate, peers: Peers, registry: CollectorRegistry
) -> None:
    """From now on, copies resumable streams to `peers`, and recreates them when their clients return to this host. app:
    the HTTP application without access control."""
    regenerators = {
        resumable.PATH: partial(resumable.regenerate, gate, streams),
        "/": partial(regenerate, app),
    }
    copies = streams.copies = StreamCopies(peers, regenerators, streams.hand_over)
    registry.register(CopiesMetric(lambda: copies.are_active))


class CopiesMetric:
    """A collector: whether other hosts have copies of this host's streams."""

    def __init__(self, are_active: Callable[[], bool]) -> None:
        self._are_active = are_active

    def collect(self) -> Iterator[Metric]:
        metric = Metric(STREAMS_COPIED, "1: another host has a copy of each resumable stream; 0: none has.", "gauge")
        metric.add_sample(STREAMS_COPIED, {}, float(self._are_active()))
        yield metric


class ServedHost(Host, Protocol):
    @property
    def metrics_registry(self) -> CollectorRegistry:
        """Exported on the metrics port; access control adds its counters."""


_GRPC_DRAIN_S: Final = 86_400.0
"""How long calls in flight may continue when the host begins to stop; the host ends them earlier, with an error."""


class FrontendServer:
    """The endpoints of one host.

    The context's `access` guards HTTP and gRPC; the metrics port is open. `claims`: ports already bound. `edge`: set if
    frontend processes have the clients' connections; the address of `grpc` is then a Unix socket. `counts`: the number
    of HTTP connections, shared by the processes on the port.
    """

    def __init__(
        self,
        context: FrontendContext,
        http_app: ASGIApp,
        *,
        http: Endpoint,
        grpc: Endpoint,
        metrics: Endpoint,
        claims: ClaimedPorts | None = None,
        pages: PageSettings = NO_PAGES,
        edge: Edge | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._context = context
        self._server = cast(ServedHost, context.server)
        self._http_app = http_app
        self._access = context.access
        self._protocols = context.options
        self._grpc_endpoint = replace(grpc, reuse_port=self._protocols.grpc_reuse_port)
        self._bind = partial(ClaimedPorts.claim, http=http, metrics=metrics, grpc=self._grpc_endpoint)
        self._claims = claims
        self._edge = edge
        self._counts = counts
        self._page_settings = pages
        self._pages: PageProxy | None = None
        self._page_api: HttpEndpoint | None = None
        self._page_api_socket: socket.socket | None = None
        self._is_bound = False
        self._http: HttpEndpoint | None = None
        self._metrics: HttpEndpoint | None = None
        self._grpc: GrpcServer | None = None
        self._grpc_stopping: asyncio.Future[None] | None = None
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self.metrics_port: int | None = None

    def bind(self) -> None:
        """Binds all ports without listening, so that conflicts with other processes are detected before anything is
        loaded. Raises OSError; then no port stays bound."""
        self._claims = self._claims or self._bind()
        self._is_bound = True
        try:
            self._make_endpoints(self._claims)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the ports of a server that was not started."""
        if self._claims is not None:
            self._claims.close()
        if self._page_api_socket is not None:
            self._page_api_socket.close()

    def _make_endpoints(self, claims: ClaimedPorts) -> None:
        registry = self._server.metrics_registry
        if claims.http is not None:
            guarded = with_cors(self._access.wrap_http(self._http_app, registry), self._protocols.cors)
            guarded = with_middleware(guarded, self._protocols.middleware)
            served = self._with_pages(guarded)
            tunnels: Tunnels | None = self._pages
            if self._edge is not None:
                served, tunnels = self._edge.wrap(served), self._edge.tunnels(tunnels)
            faces_clients = self._edge is None or claims.http.family != socket.AF_UNIX
            if self._protocols.answers_request_ids and faces_clients:
                served = with_request_ids(served)
            self._http = HttpEndpoint(
                with_routed_paths(served, self._protocols.root_path),
                claims.http,
                self._access.http_tls_context,
                tunnels,
                self._sites_of(claims.http),
            )
            self.http_port = self._http.port
        if claims.metrics is not None:
            sites = self._sites_of(claims.metrics)
            self._metrics = HttpEndpoint(create_metrics_app(registry), claims.metrics, lambda: None, sites=sites)
            self.metrics_port = self._metrics.port

    def _sites_of(self, claim: socket.socket) -> SiteCheck | None:
        """None for a Unix socket, whose requests have been checked by a frontend process."""
        if claim.family == socket.AF_UNIX:
            return None
        is_open = not self._access.has_keys and is_local(claim.getsockname()[0])
        return SiteCheck(self._protocols.cors.origins, self._protocols.allowed_hosts, checks_host=is_open)

    def _with_pages(self, app: ASGIApp) -> ASGIApp:
        """`app` behind the web pages, whose process accesses `app` over a Unix socket."""
        if not self._page_settings.enabled:
            return app
        from llmbackend.frontends.page_proxy import PageProxy

        self._pages = PageProxy(self._page_settings, SiteCheck(hosts=self._protocols.allowed_hosts))
        self._page_api_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = str(self._pages.process.api_path)
        try:
            self._page_api_socket.bind(path)
        except OSError as error:
            raise OSError(f"the socket '{path}' cannot be made: {error}. Set TMPDIR to another folder") from error
        self._page_api = HttpEndpoint(app, self._page_api_socket, lambda: None)
        return self._pages.wrap(app)

    async def start(self) -> None:
        """Listens on all ports (after `bind` if needed) for as many connections as there are descriptors. Raises
        OSError or RuntimeError if a port is taken; then none stays open."""
        if not self._is_bound:
            self.bind()
        room = DescriptorRoom.now()
        limits = fitted(self._context.limits, room)
        protocol = CaseKeepingProtocol if self._protocols.http_forward else GuardedProtocol
        metrics_limits = replace(limits.http, max_connections=limits.metrics_max_connections)
        try:
            if self._http is not None:
                await self._http.start(limits.http, protocol, room.first_reserved, self._counts)
            if self._page_api is not None:
                await self._page_api.start(limits.http, GuardedProtocol, room.first_reserved)
            if self._metrics is not None:
                await self._metrics.start(metrics_limits, GuardedProtocol, room.first_reserved)
            await self._start_grpc(limits.grpc)
        except BaseException:
            await self.stop(grace_s=0)
            raise

    async def _start_grpc(self, limits: GrpcLimits) -> None:
        endpoint = self._grpc_endpoint
        if not endpoint.enabled:
            return
        if self._claims is not None and self._claims.grpc is not None:
            self._claims.grpc.close()  # gRPC binds its own socket
        check_threads()
        registry = self._server.metrics_registry
        access = self._access.grpc_interceptors(registry)
        self._grpc, self.grpc_port = await create_grpc_server(
            self._context,
            address=_grpc_target(endpoint.address, endpoint.port),
            limits=limits,
            interceptors=access if self._edge is None else self._edge.interceptors(access),
        )
        await self._grpc.start()

    def copy_streams(self, peers: Peers) -> None:
        """From now on, copies resumable streams to other hosts of the cluster."""
        context = self._context
        copy_streams(context.streams, self._http_app, context.gate, peers, self._server.metrics_registry)

    async def leave(self) -> None:
        """To be called before the host stops: resumable streams move to the hosts with copies. As in Triton, gRPC
        refuses new connections and calls; those in progress continue until `stop`."""
        self._context.streams.leave()
        if self._grpc is not None:
            self._grpc_stopping = asyncio.ensure_future(self._grpc.stop(_GRPC_DRAIN_S))

    async def stop(self, grace_s: float) -> None:
        """Refuses new work, waits up to `grace_s` seconds for running work, then closes everything. Call it once."""
        endpoints = (self._http, self._page_api, self._metrics)
        stops: list[Awaitable[None]] = [endpoint.stop(grace_s) for endpoint in endpoints if endpoint is not None]
        if self._pages is not None:
            stops.append(self._pages.process.stop())
        if self._grpc is not None:
            stops.append(self._grpc.stop(grace_s))
        if self._grpc_stopping is not None:
            stops.append(self._grpc_stopping)
        await asyncio.gather(*stops)
        if self._edge is not None:
            await self._edge.close()
        self._context.gate.close()
        self.close()


def _grpc_target(host: str, port: int) -> str:
    return host if host.startswith(UNIX) else f"{in_url(host)}:{port}"
