"""What a host needs to know to be one of several that frontends of other machines use, too.

For: the launcher of a cluster, which gives it, and the serve process. Does not know: how hosts find each other.
Invariant: frontends of such a host are not its children, so that they outlive it (`ServerSettings.host_folder`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmbackend.links.secrets import ClusterSecrets
    from llmbackend.remote.host_endpoint import HostEndpoint


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
