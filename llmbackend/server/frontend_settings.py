"""What a frontend process is told when it starts: one frozen message.

For: the frontend process and whatever starts it: the host, or the launcher of a cluster. Does not know: flags, models.
Invariant: whoever starts a process on this machine may read what is in it, so that it travels over a pipe to the child
and never over a network.
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
    """What a host and the frontend processes of its machine share, in a folder that only their user may enter."""

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
        """The endpoint that inferences are sent to (`remote/`)."""
        return f"ipc://{self.path / 'requests.sock'}"

    @property
    def counts(self) -> Path:
        """See SharedCounts; the host is the first of its processes, and a frontend has its number."""
        return self.path / "counts"

    @property
    def metrics(self) -> Path:
        """Where frontends keep their counters, for the host's metrics page."""
        return self.path / "metrics"


@dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """Of one frontend process."""

    number: int
    """From 1, as in its lines of the log."""
    host: HostFolder
    """Of the host on this machine."""
    peers: tuple[str, ...] = ()
    """Endpoints of the hosts of other machines, in order of preference; hosts tell of more."""
    keys: ClusterSecrets | None = None
    """Of the cluster, for the links to all hosts; None on a single machine."""
    http: Endpoint
    """The port is shared by all frontends of the machine; it is given, not 0."""
    grpc: Endpoint
    limits: FrontendLimits
    access: AccessSettings
    protocols: ProtocolOptions
    http_max_input_size_bytes: int
    openai_max_input_size_bytes: int
    exit_timeout_s: float = 30
    """What running requests get when this process alone is told to end (SIGTERM)."""
    has_pages: bool = False
    """Whether the host serves web pages."""
    is_verbose: bool = False
    """Whether debug lines are logged."""

    @property
    def name(self) -> str:
        return f"frontend {self.number}"


@dataclass(frozen=True, kw_only=True)
class ClusterMember:
    host_id: str
    endpoint: str
    """Where frontends of other machines reach this host: tcp://ADDRESS:PORT, port 0 for any."""
    keys: ClusterSecrets
    """Of the cluster."""
    on_serving: Callable[[Sequence[HostEndpoint]], None]
    """Called once the host answers, on its event loop: with the endpoint in the host's folder and the one over TCP,
    whose `endpoint` says the port that it has. Peers are to be set on both (`set_peers`)."""
    on_stopping: Callable[[], None] = lambda: None
    """Called when the host is told to end, before anything else: no load should wait for other machines any more."""


_SIZE_BYTES: Final = 4


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To the process: the host answers, so listen."""


class Reload(msgspec.Struct, frozen=True, tag=True):
    """To the process: read API keys and certificates again."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To the process: the host is stopping, so gRPC accepts no more connections and calls."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """To the process: accept nothing more, give what runs so many seconds, then end."""

    grace_s: float


class Serving(msgspec.Struct, frozen=True, tag=True):
    """From the process: it listens. Sent again every ALIVE_EVERY_S, so that one that hangs is noticed."""


ALIVE_EVERY_S: Final = 5.0
Message = Serve | Reload | Leave | Drain | Serving


def send_settings(channel: socket.socket, settings: FrontendSettings) -> None:
    """The parent's first message. (Pickled, as it goes to a child of this process alone.)"""
    content = pickle.dumps(settings)
    channel.sendall(len(content).to_bytes(_SIZE_BYTES) + content)


def receive_settings(channel: socket.socket) -> FrontendSettings:
    """Raises EOFError when the parent is gone."""
    size = int.from_bytes(_receive(channel, _SIZE_BYTES))
    settings: FrontendSettings = pickle.loads(_receive(channel, size))
    return settings


def _receive(channel: socket.socket, size_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < size_bytes:
        piece = channel.recv(size_bytes - len(content))
        if not piece:
            raise EOFError("the parent process is gone")
        content += piece
    return bytes(content)


class ControlChannel:
    """The messages after the settings."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, channel: socket.socket) -> ControlChannel:
        return cls(*await asyncio.open_connection(sock=channel))

    def send(self, message: Message) -> None:
        """To a process that is gone: does nothing."""
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> Message | None:
        """None: the other process is gone."""
        try:
            line = await self._reader.readline()
        except OSError:
            return None
        return msgspec.json.decode(line, type=Message) if line else None

    def close(self) -> None:
        self._writer.close()


def open_host_folder(settings: ServerSettings) -> tuple[HostFolder, SharedCounts]:
    """A host that is the next one of its folder begins with no counts of its own. Raises OSError."""
    folder = HostFolder(settings.host_folder or temporary_directory("host"))
    folder.metrics.mkdir(exist_ok=True)
    if not folder.counts.exists():
        return folder, SharedCounts.create(folder.counts, settings.frontend_processes + 1)
    shared = SharedCounts(folder.counts, 0)
    shared.forget(0)
    return folder, shared
