"""Creates sockets by the kind of endpoint: ipc://PATH is a Unix socket, tcp://HOST:PORT is ZeroMQ with CURVE.

Used by HostEndpoint and HostLink. Independent of what messages mean. Invariant: links over a network are encrypted.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import threading
from pathlib import Path
from typing import Final, cast

import zmq

from llmbackend.links.secrets import ClientCheck, ClusterSecrets
from llmbackend.links.sockets import HANDSHAKE_FAILURES, HandshakeFailure, Monitor, descriptor, is_readable, new_socket
from llmbackend.waiting.wakeup import Wakeup

from .sockets import Connection, ConnectionOwner, HostSocket, Parts, Sender
from .unix_sockets import SILENCE_TIMEOUT_S, UnixConnection, UnixHostSocket
from .wire import Frame

FRONTEND_HEARTBEAT_TIMEOUT_S: Final = 5.0
"""If there is no heartbeat for this long, the other end counts as lost."""
_MESSAGES_AT_ONCE: Final = 64
_EVENTS: Final = HANDSHAKE_FAILURES | zmq.Event.DISCONNECTED
_FAILURES: Final = {
    HandshakeFailure.REFUSED_KEY: "the host does not accept this frontend's key",
    HandshakeFailure.PROTOCOL: "the host does not use the encryption of links, or has another key",
    HandshakeFailure.ENDED: "the connection ended before it was encrypted: another key, or none",
    HandshakeFailure.SILENCE: "the connection ended before it was encrypted: another key, or none",
}


def receive(socket: zmq.Socket[bytes]) -> Parts | None:
    """The next message; None if there is none."""
    if not is_readable(socket):
        return None
    return [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]


class ZmqHostSocket:
    """A HostSocket."""

    def __init__(self, endpoint: str, keys: ClusterSecrets | None, heartbeat_timeout_s: float) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lock = threading.Lock()
        """Held while the socket is used."""

    def bind(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._check = None if self._keys is None else ClientCheck(self._context, self._keys.curve_public_key)
        self._socket = new_socket(self._context, zmq.ROUTER, self._keys, self._heartbeat_timeout_s)
        self._monitor = Monitor(self._socket, _EVENTS)
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            self._close_socket()
            raise OSError(error.errno, f"cannot listen on {self.endpoint}: {error.strerror}") from None
        self.endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self._wakeup = Wakeup()
        self._poll = select.poll()
        for fd in (descriptor(self._socket), descriptor(self._monitor.socket), self._wakeup.fileno()):
            self._poll.register(fd, select.POLLIN)

    def close(self) -> None:
        self._close_socket()
        self._wakeup.close()

    def _close_socket(self) -> None:
        self._monitor.close()
        self._socket.close()
        if self._check is not None:
            self._check.close()
        self._context.term()

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1e3)
        self._wakeup.clear()

    def wake(self) -> None:
        self._wakeup.set()

    def has_lost(self) -> bool:
        return any(event.kind == zmq.Event.DISCONNECTED for event in self._monitor.read())

    def receive(self) -> list[tuple[Sender, Parts]]:
        messages: list[tuple[Sender, Parts]] = []
        with self._lock:
            while len(messages) < _MESSAGES_AT_ONCE and (message := receive(self._socket)) is not None:
                sender, *parts = message
                messages.append((bytes(sender), parts))
        return messages

    def send(self, to: Sender, message: list[Frame]) -> bool:
        with self._lock:
            try:
                self._socket.send_multipart([to, *message], zmq.NOBLOCK, copy=len(message) == 1)
            except zmq.ZMQError:  # EHOSTUNREACH
                self.wake()
                return False
            if is_readable(self._socket):  # sending may clear the descriptor's readable state
                self.wake()
        return True


class ZmqConnection:
    """A Connection. ZeroMQ keeps trying until it is established."""

    def __init__(
        self, endpoint: str, keys: ClusterSecrets | None, heartbeat_timeout_s: float, owner: ConnectionOwner
    ) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None

    def open(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER, self._keys, self._heartbeat_timeout_s)
        self._socket.routing_id = os.urandom(16).replace(b"\0", b"\1")  # ids with a leading 0 are reserved by ZeroMQ
        self._monitor = Monitor(self._socket, _EVENTS)
        self._loop.add_reader(descriptor(self._socket), self._owner.on_readable)
        self._loop.add_reader(descriptor(self._monitor.socket), self._read_monitor)
        self._socket.connect(self._endpoint)
        self._loop.call_soon(self._owner.on_readable)  # the descriptor may stay silent until its socket is queried
        self._loop.call_soon(self._read_monitor)

    def receive(self) -> Parts | None:
        return None if self._socket is None else receive(self._socket)

    def send(self, message: list[Frame]) -> None:
        if self._socket is None:
            return
        self._socket.send_multipart(message, zmq.NOBLOCK, copy=len(message) == 1)
        if is_readable(self._socket):  # sending may clear the descriptor's readable state
            self._loop.call_soon(self._owner.on_readable)

    def close(self, linger_s: float = 0.0) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        self._loop.remove_reader(descriptor(socket))
        self._loop.remove_reader(descriptor(self._monitor.socket))
        self._monitor.close()
        socket.close(math.ceil(linger_s * 1e3))
        self._context.term()

    def _read_monitor(self) -> None:
        if self._socket is None:
            return
        for event in self._monitor.read():
            if event.failure is not None:
                self._owner.on_fault(f"{self._endpoint}: {_FAILURES[event.failure]}")
            elif event.kind == zmq.Event.DISCONNECTED:
                self._owner.on_end()
                return


_IPC: Final = "ipc://"
_TCP: Final = "tcp://"


def check_endpoint(endpoint: str, keys: ClusterSecrets | None) -> None:
    """Raises ValueError for an unknown kind of endpoint, and for a TCP endpoint without keys."""
    if endpoint.startswith(_TCP):
        if keys is None:
            raise ValueError(f"endpoint '{endpoint}' needs the cluster's key: links over a network are encrypted")
    elif not endpoint.startswith(_IPC):
        raise ValueError(f"endpoint '{endpoint}' is not supported, expected ipc://PATH or tcp://HOST:PORT")


def new_host_socket(endpoint: str, keys: ClusterSecrets | None, timeout_s: float | None) -> HostSocket:
    """timeout_s: a peer that is silent for longer is lost; None = the kind's default. Raises as `check_endpoint`."""
    check_endpoint(endpoint, keys)
    if endpoint.startswith(_IPC):
        return UnixHostSocket(_path(endpoint), timeout_s or SILENCE_TIMEOUT_S)
    return ZmqHostSocket(endpoint, keys, timeout_s or FRONTEND_HEARTBEAT_TIMEOUT_S)


def new_connection(
    endpoint: str, keys: ClusterSecrets | None, timeout_s: float | None, owner: ConnectionOwner
) -> Connection:
    """A frontend's connection, on an event loop. Arguments and errors as for `new_host_socket`."""
    check_endpoint(endpoint, keys)
    if endpoint.startswith(_IPC):
        return UnixConnection(_path(endpoint), timeout_s or SILENCE_TIMEOUT_S, owner)
    return ZmqConnection(endpoint, keys, timeout_s or FRONTEND_HEARTBEAT_TIMEOUT_S, owner)


def _path(endpoint: str) -> Path:
    return Path(endpoint.removeprefix(_IPC))
