"""ZeroMQ sockets of links: their settings, their encryption, and what their monitors tell.

For: both ends of a link. Does not know: messages. Invariants: a socket never blocks and never keeps a process from
ending; over TCP nothing is sent unless both ends have the cluster's key.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

HEARTBEAT_TIMEOUT_S: Final = 5.0
"""Silence after which an end counts as gone."""
_POLLIN: Final = int(zmq.POLLIN)
_EVENTS: Final = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
)


class CurveKeys(NamedTuple):
    """The key pair that all processes of a cluster have, in ZeroMQ's Z85."""

    public: bytes
    secret: bytes


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: CurveKeys | None, heartbeat_timeout_s: float
) -> zmq.Socket[bytes]:
    """A ROUTER (the host's end) or a DEALER (a frontend's), neither bound nor connected."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(0)  # what waits is counted in bytes, by the ends of the link
    timeout_ms = math.ceil(heartbeat_timeout_s * 1e3)
    socket.heartbeat_ivl = max(timeout_ms // 3, 1)
    socket.heartbeat_timeout = timeout_ms
    socket.heartbeat_ttl = timeout_ms
    if kind == zmq.ROUTER:
        socket.router_mandatory = True
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys
        if kind == zmq.ROUTER:
            socket.curve_server = True
        else:
            socket.curve_serverkey = keys.public
    return socket


def check_endpoint(endpoint: str, keys: CurveKeys | None) -> None:
    """Raises ValueError for an endpoint that cannot be used, or not safely."""
    if endpoint.startswith("tcp://"):
        if keys is None:
            raise ValueError(f"endpoint '{endpoint}' needs the cluster's key: a network link is never in plain text")
    elif not endpoint.startswith("ipc://"):
        raise ValueError(
            f"endpoint '{endpoint}' is of no kind that a link can use, expected ipc://PATH or tcp://HOST:PORT"
        )


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Readable when it is time to ask `is_readable` again; it may stay silent until that is asked."""
    return cast(int, socket.getsockopt(zmq.FD))


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & _POLLIN)


class Monitor:
    """What happens to a socket's connections."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._watched = socket
        self._events = socket.get_monitor_socket(_EVENTS)

    @property
    def fd(self) -> int:
        return descriptor(self._events)

    def read(self) -> list[zmq.Event]:
        found = []
        while is_readable(self._events):
            found.append(zmq.Event(recv_monitor_message(self._events)["event"]))
        return found

    def close(self) -> None:
        """Before the socket is closed."""
        self._watched.disable_monitor()
        self._events.close()


def receive(socket: zmq.Socket[bytes]) -> list[memoryview] | None:
    """The parts of the next message; None when there is none."""
    if not is_readable(socket):
        return None
    return [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]
