"""Which kind of socket an endpoint has: ipc://PATH a Unix socket, tcp://HOST:PORT ZeroMQ's with CURVE.

For: HostEndpoint and HostLink. Does not know: how the kinds work. Invariant: a link over a network is never in plain
text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llmbackend.links.secrets import ClusterSecrets

from .sockets import Connection, ConnectionOwner, HostSocket
from .unix_sockets import SILENCE_TIMEOUT_S, UnixConnection, UnixHostSocket
from .zmq_sockets import FRONTEND_HEARTBEAT_TIMEOUT_S, ZmqConnection, ZmqHostSocket

_IPC: Final = "ipc://"
_TCP: Final = "tcp://"


def check_endpoint(endpoint: str, keys: ClusterSecrets | None) -> None:
    """Raises ValueError for an endpoint that cannot be used, or not safely."""
    if endpoint.startswith(_TCP):
        if keys is None:
            raise ValueError(f"endpoint '{endpoint}' needs the cluster's key: a network link is never in plain text")
    elif not endpoint.startswith(_IPC):
        raise ValueError(
            f"endpoint '{endpoint}' is of no kind that a link can use, expected ipc://PATH or tcp://HOST:PORT"
        )


def new_host_socket(endpoint: str, keys: ClusterSecrets | None, timeout_s: float | None) -> HostSocket:
    """timeout_s: after which a silent peer is gone; None = that of the kind. Raises ValueError as `check_endpoint`."""
    check_endpoint(endpoint, keys)
    if endpoint.startswith(_IPC):
        return UnixHostSocket(_path(endpoint), timeout_s or SILENCE_TIMEOUT_S)
    return ZmqHostSocket(endpoint, keys, timeout_s or FRONTEND_HEARTBEAT_TIMEOUT_S)


def new_connection(
    endpoint: str, keys: ClusterSecrets | None, timeout_s: float | None, owner: ConnectionOwner
) -> Connection:
    """A frontend's, on an event loop; else as `new_host_socket`."""
    check_endpoint(endpoint, keys)
    if endpoint.startswith(_IPC):
        return UnixConnection(_path(endpoint), timeout_s or SILENCE_TIMEOUT_S, owner)
    return ZmqConnection(endpoint, keys, timeout_s or FRONTEND_HEARTBEAT_TIMEOUT_S, owner)


def _path(endpoint: str) -> Path:
    return Path(endpoint.removeprefix(_IPC))
