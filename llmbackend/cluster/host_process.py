"""`python -m llmbackend.cluster.host_process`: this machine's host, whose engines are where the cluster has them.

For: the launcher. Does not know: Ray. Invariant: it ends, in order, with its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.process.served.locating import EngineAddress, stop_loads, use_locator
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.remote import wire
from llmbackend.remote.host_endpoint import HostEndpoint
from llmbackend.server.frontend_settings import ClusterMember
from llmbackend.server.settings import ServerSettings

from .messages import EngineLocation, FromAgent, FromHost, HostAddress, HostServing, WantedEngine, Wants, engine_key

log = logging.getLogger(__name__)

RECONNECT_S: Final = 0.2
_decode = msgspec.json.Decoder(FromAgent).decode
_encode = msgspec.json.Encoder().encode


class AgentLocator:
    """Any thread. One thread of its own reads what the agent says."""

    def __init__(self, agent: Path) -> None:
        """agent: its Unix socket."""
        self._agent = agent
        self._peers: tuple[HostAddress, ...] | None = None
        """None: the agent has not said yet."""
        self._peers_changed: Callable[[tuple[HostAddress, ...]], None] = lambda peers: None
        self._lock = threading.Lock()
        self._wanted: dict[str, WantedEngine] = {}
        self._serving: HostServing | None = None
        self._states: dict[str, EngineLocation] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._link: socket.socket | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="cluster-agent", daemon=True)
        self._thread.start()

    def locate(self, index: int, config: EngineConfig) -> EngineAddress | None:
        """As EngineLocator. Raises EngineDeadError when waiting does not help."""
        key = engine_key(index, config)
        with self._lock:
            if key not in self._wanted:
                self._wanted[key] = WantedEngine(index, config)
                self._send_wants()
            state = self._states.get(key)
        if state is None:
            return None
        if state.is_final:
            raise EngineDeadError(state.error, "load")
        return EngineAddress(state.endpoint, state.incarnation, state.node) if state.endpoint else None

    def on_change(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)

    def release(self, index: int, config: EngineConfig) -> None:
        with self._lock:
            key = engine_key(index, config)
            self._states.pop(key, None)
            if self._wanted.pop(key, None) is not None:
                self._send_wants()

    def serve(self, endpoint: str, peers_changed: Callable[[tuple[HostAddress, ...]], None]) -> None:
        """The host answers frontends of other machines at `endpoint`. peers_changed: called with the other hosts of the
        cluster, once they are known, and on this object's thread when they change; it must not call back."""
        with self._lock:
            self._serving, self._peers_changed = HostServing(endpoint), peers_changed
            self._send(self._serving)
            if self._peers is not None:
                peers_changed(self._peers)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._link is not None:
                self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _listen(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.connect(str(self._agent))
                with self._lock:
                    if self._is_closed:
                        return
                    self._link = link
                    self._send_wants()
                    if self._serving is not None:
                        self._send(self._serving)
                self._hear(link)
            with self._lock:
                self._link = None
            time.sleep(RECONNECT_S)

    def _hear(self, link: socket.socket) -> None:
        with link.makefile("rb") as lines:
            for line in lines:
                self._take(_decode(line))

    def _take(self, message: FromAgent) -> None:
        if not isinstance(message, EngineLocation):
            with self._lock:
                self._peers = message.peers
                self._peers_changed(message.peers)
            return
        if message.error:
            log.error("%s", message.error)
        with self._lock:
            if message.key not in self._wanted:
                return
            self._states[message.key] = message
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback()

    def _send_wants(self) -> None:
        self._send(Wants(tuple(self._wanted.values())))

    def _send(self, message: FromHost) -> None:
        """With the lock. What an agent misses, the next one is told: it gets all wants when it is there."""
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.sendall(_encode(message) + b"\n")


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
    from llmbackend.server.serve import run_server

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

    def set_peers(peers: tuple[HostAddress, ...]) -> None:
        others = [wire.HostPeer(peer.id, peer.endpoint) for peer in peers if peer.endpoint]
        for endpoint in endpoints:
            endpoint.set_peers(others)

    locator.serve(endpoints[-1].endpoint, set_peers)


def _end_with_input() -> None:
    os.read(sys.stdin.fileno(), 1)
    log.error("the launcher has exited: stopping this host")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
