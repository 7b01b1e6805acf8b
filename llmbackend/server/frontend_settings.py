"""The settings of a frontend process, and the messages between it and its parent.

Used by the frontend process and its parent, which is the host or a cluster's launcher. Invariant: the settings contain
secrets and are sent only to a child process over a socket pair, never over a network.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.limits import FrontendLimits
from llmbackend.frontends.protocol_options import ProtocolOptions
from llmbackend.frontends.shared_counts import SharedCounts
from llmbackend.links.secrets import ClusterSecrets

from .ports import Endpoint
from .process import temporary_directory
from .settings import ServerSettings

if TYPE_CHECKING:
    from llmbackend.remote.host_endpoint import HostEndpoint


@dataclass(frozen=True)
class HostFolder:
    """Sockets and files shared by a host and the frontend processes of its machine, in a folder of their user alone."""

    path: Path

    @property
    def http(self) -> Path:
        """The socket of the host's HTTP application."""
        return self.path / "http.sock"

    @property
    def grpc(self) -> Path:
        """The socket of its gRPC server."""
        return self.path / "grpc.sock"

    @property
    def requests(self) -> str:
        """The endpoint for inference requests (`remote/`)."""
        return f"ipc://{self.path / 'requests.sock'}"

    @property
    def counts(self) -> Path:
        """File of the SharedCounts. The host is process 0; a frontend has its own number."""
        return self.path / "counts"

    @property
    def metrics(self) -> Path:
        """Folder of the frontends' counters, for the host's metrics."""
        return self.path / "metrics"


@dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """The settings of one frontend process."""

    number: int
    """Counts from 1; part of the process's name in the log."""
    host: HostFolder
    """The folder of the host on this machine, which announces hosts on other machines."""
    keys: ClusterSecrets | None = None
    """The cluster's keys for links to its hosts; None for a single machine."""
    http: Endpoint
    """Has the actual port, which all frontends of the machine share."""
    grpc: Endpoint
    limits: FrontendLimits
    access: AccessSettings
    protocols: ProtocolOptions
    http_max_input_size_bytes: int
    openai_max_input_size_bytes: int
    exit_timeout_s: float = 30
    """Time limit for running requests when this process gets SIGTERM."""
    has_pages: bool = False
    """Whether the host serves web pages."""
    is_verbose: bool = False
    """Whether debug lines are logged."""

    @property
    def name(self) -> str:
        return f"frontend {self.number}"


@dataclass(frozen=True, kw_only=True)
class ClusterMember:
    """What a host of a cluster needs in addition to ServerSettings."""

    host_id: str
    endpoint: str
    """Where frontends of other machines reach this host: tcp://ADDRESS:PORT, port 0 = any free."""
    keys: ClusterSecrets
    """The cluster's keys."""
    on_serving: Callable[[Sequence[HostEndpoint]], None]
    """Called on the event loop when the host answers, with its endpoints in the host's folder and over TCP. Should set
    the peers of both (`set_peers`)."""
    on_stopping: Callable[[], None] = lambda: None
    """Called first when the host is told to end, so that no load keeps waiting for other machines."""


_SIZE_BYTES: Final = 4


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To the process: listen."""


class Reload(msgspec.Struct, frozen=True, tag=True):
    """To the process: reload API keys and certificates."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To the process: the host is stopping; gRPC must refuse new connections and calls."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """To the process: refuse new work, give running work this many seconds, then end."""

    grace_s: float


class Serving(msgspec.Struct, frozen=True, tag=True):
    """From the process: it is listening. Repeated every HEARTBEAT_INTERVAL_S, so that a hung process is detected."""


HEARTBEAT_INTERVAL_S: Final = 5.0
Message = Serve | Reload | Leave | Drain | Serving


def send_settings(channel: socket.socket, settings: FrontendSettings) -> None:
    """Sends the parent's first message. (Pickled, because only a child process reads it.)"""
    content = pickle.dumps(settings)
    channel.sendall(len(content).to_bytes(_SIZE_BYTES) + content)


def receive_settings(channel: socket.socket) -> FrontendSettings:
    """Raises EOFError if the parent has ended."""
    size = int.from_bytes(_receive(channel, _SIZE_BYTES))
    settings: FrontendSettings = pickle.loads(_receive(channel, size))
    return settings


def _receive(channel: socket.socket, size_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < size_bytes:
        piece = channel.recv(size_bytes - len(content))
        if not piece:
            raise EOFError("the parent process has ended")
        content += piece
    return bytes(content)


class ControlChannel:
    """Carries the messages after the settings."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, channel: socket.socket) -> ControlChannel:
        return cls(*await asyncio.open_connection(sock=channel))

    def send(self, message: Message) -> None:
        """Does nothing if the other process has ended."""
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> Message | None:
        """None = the other process has ended."""
        try:
            line = await self._reader.readline()
        except OSError:
            return None
        return msgspec.json.decode(line, type=Message) if line else None

    def close(self) -> None:
        self._writer.close()


def open_host_folder(settings: ServerSettings) -> tuple[HostFolder, SharedCounts]:
    """Creates the folder's files; in the folder of a previous host, removes that host's counts. Raises OSError."""
    folder = HostFolder(settings.host_folder or temporary_directory("host"))
    folder.metrics.mkdir(exist_ok=True)
    if not folder.counts.exists():
        return folder, SharedCounts.create(folder.counts, settings.frontend_processes + 1)
    shared = SharedCounts(folder.counts, 0)
    shared.forget(0)
    return folder, shared
