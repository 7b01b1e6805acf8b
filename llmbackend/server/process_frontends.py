"""A host with frontend processes: they have the clients' ports, the host has private sockets.

Used by the serve process if `--frontend-processes` is above 1, and by the hosts of a cluster. Independent of how a
frontend works. Invariant: frontends begin to listen after the host answers, and end after its requests.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.host_forwarding import HostEdge
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.limits import FrontendLimits
from llmbackend.frontends.shared_counts import SharedCounts
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.remote.host_endpoint import HostEndpoint
from llmbackend.remote.peer_calls import PeerCalls

from .frontend_processes import FrontendProcesses, FrontendsFailedError
from .frontend_settings import ClusterMember, FrontendSettings, HostFolder
from .frontends import make_frontends
from .ports import ClaimedPorts, port_of
from .process import in_thread
from .settings import ServerSettings

_ANNOUNCED_WITHIN_S = 5.0
"""A frontend that hangs for longer learns about a change later."""
_MANY = (1 << 31) - 1


class ProcessFrontends:
    """Implements the ports and methods of FrontendServer that serve.py uses."""

    def __init__(
        self,
        server: InferenceServer,
        settings: ServerSettings,
        access: AccessControl,
        server_log: ServerLog,
        store: ResponseStore,
        claims: ClaimedPorts,
        folder: HostFolder,
        shared: SharedCounts,
        member: ClusterMember | None = None,
    ) -> None:
        """To be called on the event loop. Starts the processes, unless another process does (`settings.host_folder` is
        set); they import their modules while models load. access: without TLS, which the frontends terminate."""
        self._claims = claims
        self.http_port, self.grpc_port = port_of(claims.http), port_of(claims.grpc)
        starts = () if settings.host_folder is not None else frontend_settings_of(settings, folder, claims)
        self._processes = FrontendProcesses(starts, shared.forget)
        self._processes.start()
        private = ClaimedPorts(http=_bound(folder, settings), metrics=claims.metrics, grpc=None)
        inside = replace(settings, limits=_inside(settings.limits))
        self._member = member
        self._peer_calls: PeerCalls | None = None
        self._requests = [HostEndpoint(server, folder.requests)]
        if member is not None:
            self._requests = [
                HostEndpoint(server, endpoint, host_id=member.host_id, keys=member.keys)
                for endpoint in (folder.requests, member.endpoint)
            ]
        edge = HostEdge(self._announce)
        self._private = make_frontends(server, inside, access, server_log, store, private, folder, shared, edge)
        self.metrics_port = self._private.metrics_port

    async def start(self) -> None:
        """Raises OSError or RuntimeError if the ports cannot be bound."""
        for endpoint in self._requests:
            endpoint.start()
        if self._member is not None:
            self._peer_calls = PeerCalls(self._requests[-1], self._member.host_id, self._member.keys)
            self._private.copy_streams(self._peer_calls)
        await self._private.start()
        if self._member is not None:
            self._member.on_serving(self._requests)
        try:
            await self._processes.serve()
        except FrontendsFailedError as error:
            await self.stop(grace_s=0)
            raise RuntimeError(str(error)) from None

    def reload(self) -> None:
        self._processes.reload()

    async def _announce(self) -> None:
        await asyncio.gather(*(in_thread(endpoint.announce, _ANNOUNCED_WITHIN_S) for endpoint in self._requests))

    async def leave(self) -> None:
        """Frontends move the requests that other hosts can continue; clients of resumable streams move too. gRPC
        refuses new connections and calls."""
        self._processes.leave()
        await self._private.leave()
        if self._member is not None:
            await asyncio.gather(*(in_thread(endpoint.leave) for endpoint in self._requests))

    async def stop(self, grace_s: float) -> None:
        """Stops the frontends first, because they forward the host's last answers."""
        await self._processes.stop(grace_s)
        await self._private.stop(grace_s)
        if self._peer_calls is not None:
            self._peer_calls.close()
        for endpoint in self._requests:
            await in_thread(endpoint.close)
        self._claims.close()


def frontend_settings_of(
    settings: ServerSettings, folder: HostFolder, claims: ClaimedPorts, keys: ClusterSecrets | None = None
) -> list[FrontendSettings]:
    """Settings of the frontend processes of the host in `folder`. claims: ports on which the processes listen. keys:
    see FrontendSettings."""
    return [
        FrontendSettings(
            number=number,
            host=folder,
            keys=keys,
            http=replace(settings.http, port=port_of(claims.http) or 0),
            grpc=replace(settings.grpc, port=port_of(claims.grpc) or 0),
            limits=_share(settings.limits, settings.frontend_processes),
            access=settings.access,
            protocols=settings.protocols,
            http_max_input_size_bytes=settings.http_max_input_size_bytes,
            openai_max_input_size_bytes=settings.openai_max_input_size_bytes,
            exit_timeout_s=settings.exit_timeout_s,
            has_pages=settings.pages.enabled,
            is_verbose=settings.log.verbose > 0,
        )
        for number in range(1, settings.frontend_processes + 1)
    ]


def _bound(folder: HostFolder, settings: ServerSettings) -> socket.socket | None:
    if not settings.http.enabled:
        return None
    folder.http.unlink(missing_ok=True)  # left behind by a previous host
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(str(folder.http))
    return bound


def _inside(limits: FrontendLimits) -> FrontendLimits:
    """Limits of the private sockets: one HTTP connection for each request, one gRPC connection for each frontend."""
    return replace(limits, grpc=replace(limits.grpc, max_streams_per_connection=_MANY))


def _share(limits: FrontendLimits, processes: int) -> FrontendLimits:
    """Limits of one frontend. Each gets an equal share of the gRPC connections, which gRPC counts itself; everything
    else is counted jointly (SharedCounts)."""
    connections = -(-limits.grpc.max_connections // processes)
    return replace(limits, grpc=replace(limits.grpc, max_connections=connections))
