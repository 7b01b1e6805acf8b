"""ZeroMQ sockets for links between processes: heartbeats, encryption, connection events.

Used for links between frontends and hosts, between hosts, and between hosts and engines. Independent of what messages
mean. Invariants: a socket does not limit its messages (senders count unread bytes) and does not keep a process from
ending unless it is closed with a linger time; connections silent for longer than the heartbeat timeout are closed.
"""

from __future__ import annotations

import errno
import math
from enum import Enum
from typing import Final, NamedTuple, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from .secrets import ClusterSecrets

_POLLIN: Final = int(zmq.POLLIN)
HANDSHAKE_FAILURES: Final = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, secrets: ClusterSecrets | None, heartbeat_timeout_s: float
) -> zmq.Socket[bytes]:
    """A ROUTER (the end that listens) or a DEALER, neither bound nor connected. secrets: None = not encrypted"""
    socket = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(0)
    timeout_ms = math.ceil(heartbeat_timeout_s * 1e3)
    socket.heartbeat_ivl = max(timeout_ms // 4, 1)
    socket.heartbeat_timeout = timeout_ms
    socket.heartbeat_ttl = timeout_ms
    if kind == zmq.ROUTER:
        socket.router_mandatory = True
    if secrets is not None:
        (secrets.secure_server if kind == zmq.ROUTER else secrets.secure_client)(socket)
    return socket


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Becomes readable when `is_readable` should be called again; then stays silent until that has been called."""
    return cast(int, socket.getsockopt(zmq.FD))


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & _POLLIN)


class HandshakeFailure(Enum):
    REFUSED_KEY = "refused key"
    PROTOCOL = "protocol"
    """The other end does not encrypt, or has another key."""
    ENDED = "ended"
    SILENCE = "silence"
    """The other end sent nothing within the handshake timeout."""


class ConnectionEvent(NamedTuple):
    kind: zmq.Event
    value: int

    @property
    def failure(self) -> HandshakeFailure | None:
        """Why the handshake failed; None for other events."""
        if self.kind == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return HandshakeFailure.REFUSED_KEY
        if self.kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            return HandshakeFailure.PROTOCOL
        if self.kind == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            return HandshakeFailure.SILENCE if self.value == errno.EAGAIN else HandshakeFailure.ENDED
        return None


class Monitor:
    """Reports events of a socket's connections."""

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        """events: flags of zmq.Event."""
        self._watched = socket
        self.socket = socket.get_monitor_socket(events)

    def read(self) -> list[ConnectionEvent]:
        """The events since the last call. Never blocks."""
        found = []
        while is_readable(self.socket):
            event = recv_monitor_message(self.socket)
            found.append(ConnectionEvent(zmq.Event(event["event"]), event["value"]))
        return found

    def close(self) -> None:
        """To be called before the socket is closed."""
        self._watched.disable_monitor()
        self.socket.close()
