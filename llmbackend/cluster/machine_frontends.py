"""The frontend processes of this machine, which outlive its hosts: their ports, and the folder where both meet.

For: the launcher. Does not know: what frontends do. Invariants: the machine's ports are claimed before anything is
started; a host finds the folder as the one before it has left it.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from llmbackend.links.secrets import ClusterSecrets

from ..server.frontend_processes import FrontendProcesses
from ..server.host_folder import open_host_folder
from ..server.ports import ClaimedPorts, PortWish
from ..server.process_frontends import frontend_settings_of
from ..server.settings import ServerSettings


class MachineFrontends:
    """Made on the event loop. Has the ports of `served_urls.Listening`."""

    metrics_port: int | None = None
    """That is the host's own."""

    def __init__(self, settings: ServerSettings, folder: Path, keys: ClusterSecrets) -> None:
        """folder: for this launcher alone. keys: of the cluster, for hosts of other machines. Raises OSError naming the
        port that another process has."""
        folder.mkdir(mode=0o700)
        self.host_settings = replace(settings, host_folder=folder)
        """Of this machine's host."""
        self._claims = ClaimedPorts.claim(
            http=PortWish(settings.http.address, settings.http.port_or_none, settings.http.reuse_port, True),
            metrics=PortWish(settings.metrics.address, None),
            grpc=PortWish(settings.grpc.address, settings.grpc.port_or_none, settings.protocols.grpc_reuse_port, True),
        )
        shared_folder, self._counts = open_host_folder(self.host_settings)
        orders = frontend_settings_of(settings, shared_folder, self._claims, keys=keys)
        self.processes = FrontendProcesses(orders, self._counts.forget)

    @property
    def http_port(self) -> int | None:
        return _port_of(self._claims.http)

    @property
    def grpc_port(self) -> int | None:
        return _port_of(self._claims.grpc)

    async def stop(self, grace_s: float) -> None:
        """They accept nothing more, and what runs gets `grace_s` seconds. Call it once."""
        await self.processes.stop(grace_s)
        self._claims.close()
        self._counts.close()


def _port_of(claim: socket.socket | None) -> int | None:
    return None if claim is None else int(claim.getsockname()[1])
