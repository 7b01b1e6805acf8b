"""`python -m llmbackend.cluster.host_process`: this machine's host, whose engines are where the cluster has them.

For: the launcher. Does not know: Ray. Invariant: it ends, in order, with its standard input.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmbackend.engine.process.served.locating import stop_loads, use_locator
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.remote import wire
from llmbackend.remote.host_endpoint import HostEndpoint

from ..server.cluster_member import ClusterMember
from ..server.settings import ServerSettings
from .locator import AgentLocator
from .messages import Peer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostOrder:
    """The host's standard input: from its parent alone, on a pipe."""

    settings: ServerSettings
    agent: Path
    """The agent's Unix socket."""
    secrets: Path
    host_id: str
    bind: str
    """This machine's address."""


def main() -> None:
    gc.disable()  # imports make objects that stay; the server enables it when it has what it needs
    order: HostOrder = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_input, name="parent", daemon=True).start()
    secrets, locator = ClusterSecrets.load(order.secrets), AgentLocator(order.agent)
    use_locator(locator, secrets, host_id=order.host_id)
    from ..server.serve import run_server

    member = ClusterMember(
        host_id=order.host_id,
        endpoint=f"tcp://[{order.bind}]:0" if ":" in order.bind else f"tcp://{order.bind}:0",
        keys=secrets,
        on_serving=partial(_meet_others, locator),
        on_stopping=stop_loads,
    )
    sys.exit(run_server(order.settings, member))


def _meet_others(locator: AgentLocator, endpoints: Sequence[HostEndpoint]) -> None:
    """endpoints: that of this machine's frontends, and that of others'."""

    def set_peers(peers: tuple[Peer, ...]) -> None:
        others = [wire.Peer(peer.id, peer.endpoint) for peer in peers if peer.endpoint]
        for endpoint in endpoints:
            endpoint.set_peers(others)

    locator.serve(endpoints[-1].endpoint, set_peers)


def _end_with_input() -> None:
    os.read(sys.stdin.fileno(), 1)
    log.error("the launcher has ended: this host ends, too")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
