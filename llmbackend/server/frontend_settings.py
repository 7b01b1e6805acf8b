"""What a frontend process is told when it starts: one frozen message.

For: the frontend process and whatever starts it: the host, or the launcher of a cluster. Does not know: flags, models.
Invariant: whoever starts a process on this machine may read what is in it, so that it travels over a pipe to the child
and never over a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.limits import FrontendLimits
from llmbackend.frontends.protocol_options import ProtocolOptions
from llmbackend.links.secrets import ClusterSecrets

from .endpoints import Endpoint


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
