"""`python -m llmbackend.cluster.host_process`: this machine's host, whose engines run anywhere in the cluster.

Started by the launcher. Independent of Ray. Invariant: it drains and ends when its standard input closes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import select
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
from llmbackend.waiting.wakeup import Wakeup

from .messages import EngineLocation, FromAgent, FromHost, HostAddress, HostServing, WantedEngine, Wants, engine_key

log = logging.getLogger(__name__)

RECONNECT_S: Final = 0.2
_READ_BYTES: Final = 1 << 16
_decode = msgspec.json.Decoder(FromAgent).decode
_encode = msgspec.json.Encoder().encode


class AgentLocator:
    """An EngineLocator. Only its own thread uses the agent's socket, so callers never wait for the agent."""

    def __init__(self, agent: Path) -> None:
        """agent: its Unix socket."""
        self._agent = agent
        self._lock = threading.Lock()
        self._wanted: dict[str, WantedEngine] = {}
        self._states: dict[str, EngineLocation] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._serving: HostServing | None = None
        self._peers_changed: Callable[[tuple[HostAddress, ...]], None] | None = None
        self._outbox: list[FromHost] = []
        """Unsent messages. Whatever one agent misses is sent to the next one when it accepts the connection."""
        self._peers: tuple[HostAddress, ...] | None = None
        """None = unknown. Used only by the thread and the next one."""
        self._shown_peers: tuple[HostAddress, ...] | None = None
        self._is_closed = False
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="cluster-agent", daemon=True)
        self._thread.start()

    def locate(self, index: int, config: EngineConfig) -> EngineAddress | None:
        key = engine_key(index, config)
        with self._lock:
            if key not in self._wanted:
                self._wanted[key] = WantedEngine(index, config)
                self._post_wants()
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
        key = engine_key(index, config)
        with self._lock:
            self._states.pop(key, None)
            if self._wanted.pop(key, None) is not None:
                self._post_wants()

    def serve(self, endpoint: str, peers_changed: Callable[[tuple[HostAddress, ...]], None]) -> None:
        """Frontends of other machines reach this host at `endpoint`. peers_changed: called on this object's thread with
        the cluster's other hosts, once they are known and whenever they change."""
        with self._lock:
            self._serving, self._peers_changed = HostServing(endpoint), peers_changed
            self._outbox.append(self._serving)
        self._wakeup.set()

    def close(self) -> None:
        self._is_closed = True
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _post_wants(self) -> None:
        """The caller holds the lock."""
        self._outbox.append(Wants(tuple(self._wanted.values())))
        self._wakeup.set()

    def _run(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.connect(str(self._agent))
                self._exchange(link)
            self._show_peers()
            time.sleep(RECONNECT_S)

    def _exchange(self, link: socket.socket) -> None:
        """Runs until the agent ends or this object is closed."""
        link.setblocking(False)
        poll, unsent, unread = select.poll(), b"", b""
        poll.register(self._wakeup, select.POLLIN)
        with self._lock:
            self._outbox = [Wants(tuple(self._wanted.values())), *([self._serving] if self._serving else [])]
        while not self._is_closed:
            self._wakeup.clear()
            with self._lock:
                messages, self._outbox = self._outbox, []
            unsent += b"".join(_encode(message) + b"\n" for message in messages)
            with contextlib.suppress(BlockingIOError):
                unsent = unsent[link.send(unsent) :]
            self._show_peers()
            poll.register(link, select.POLLIN | (select.POLLOUT if unsent else 0))
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                if not (data := link.recv(_READ_BYTES)):
                    return
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._take(_decode(line))

    def _take(self, message: FromAgent) -> None:
        if not isinstance(message, EngineLocation):
            self._peers = message.peers
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

    def _show_peers(self) -> None:
        if self._peers_changed is not None and self._peers is not None and self._peers is not self._shown_peers:
            self._shown_peers = self._peers
            self._peers_changed(self._peers)


@dataclass(frozen=True)
class HostOrder:
    """The host's standard input, a pipe that only its parent writes."""

    settings: ServerSettings
    agent: Path
    """The agent's Unix socket."""
    secrets: Path
    host_id: str
    bind: str
    """This machine's address."""


def main() -> None:
    gc.disable()  # imported objects stay; the server enables it after its imports
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
    """endpoints: the one for this machine's frontends, and the one for other machines'."""

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
