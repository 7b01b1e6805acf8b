"""Where engines run that are not children of their hosts: what a cluster tells a host.

The cluster implements and installs an EngineLocator; supervisors of remote engines use it. Independent of how engines
are placed or started. Invariant: without a locator, engines are children of their host.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from ...config import EngineConfig

if TYPE_CHECKING:
    from llmbackend.links.secrets import ClusterSecrets

ENGINE_HEARTBEAT_TIMEOUT_S: Final = 2.0
"""How long the other end of a link may be silent."""


class EngineAddress(msgspec.Struct, frozen=True):
    """endpoint     tcp://host:port
    incarnation  grows with each new process of this engine
    node         the machine, for people"""

    endpoint: str
    incarnation: int
    node: str = ""

    def __str__(self) -> str:
        return f"{self.endpoint} on {self.node}" if self.node else self.endpoint


class EngineLocator(Protocol):
    """Called from any thread. Engine `index` of a config serves instance `index` of a model; models with equal configs
    may share engines."""

    def locate(self, index: int, config: EngineConfig) -> EngineAddress | None:
        """Never blocks. None = it is not up yet; `on_change` reports when it is. Raises EngineDeadError if there will
        be none."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls `callback`, which must be cheap and thread-safe, whenever `locate` may return something else, until
        this process ends."""

    def release(self, index: int, config: EngineConfig) -> None:
        """This host no longer needs the engine. Never blocks."""


class EngineUsers:
    """The supervisors of this process that use the locator: during a reload, a model has two, which share an engine.
    Any thread."""

    def __init__(self, locator: EngineLocator) -> None:
        self._locator = locator
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._counts: Counter[tuple[int, bytes]] = Counter()
        self.are_stopping = False
        """Whether loads stop waiting for an engine that has never been up."""
        locator.on_change(self._wake)

    def enter(self, index: int, config: EngineConfig, wake: Callable[[], None]) -> None:
        """wake: called after a change"""
        with self._lock:
            self._callbacks.append(wake)
            self._counts[index, msgspec.json.encode(config)] += 1

    def leave(self, index: int, config: EngineConfig, wake: Callable[[], None]) -> None:
        """The last one releases the engine."""
        with self._lock:
            self._callbacks.remove(wake)
            key = index, msgspec.json.encode(config)
            self._counts[key] -= 1
            if self._counts[key]:
                return
            del self._counts[key]
            self._locator.release(index, config)  # before another one enters, which needs the engine

    def stop_loads(self) -> None:
        """The process is about to end: loads that wait for their first engine fail."""
        self.are_stopping = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            callbacks = tuple(self._callbacks)
        for wake in callbacks:
            wake()


@dataclass(frozen=True)
class RemoteEngines:
    """What a host needs to communicate with remote engines.

    host_id              for people and logs; unique in the cluster
    heartbeat_timeout_s  a host or engine that is silent for longer is considered lost
    """

    locator: EngineLocator
    secrets: ClusterSecrets
    host_id: str
    heartbeat_timeout_s: float
    users: EngineUsers


_installed: RemoteEngines | None = None


def use_locator(
    locator: EngineLocator | None,
    secrets: ClusterSecrets | None = None,
    *,
    host_id: str = "",
    heartbeat_timeout_s: float = ENGINE_HEARTBEAT_TIMEOUT_S,
) -> None:
    """Before models load: `transport: process` engines are located by `locator` from now on; None = children again.

    host_id: unique in the cluster; "" = derived from this machine's name and the process id.
    """
    global _installed
    if locator is None:
        _installed = None
        return
    if secrets is None:
        raise ValueError("a locator of engines needs the cluster's secrets")
    host_id = host_id or f"{socket.gethostname()}:{os.getpid()}"
    _installed = RemoteEngines(locator, secrets, host_id, heartbeat_timeout_s, EngineUsers(locator))


def stop_loads() -> None:
    """This process is about to end, and must not wait for remote engines that were never up. Any thread."""
    if _installed is not None:
        _installed.users.stop_loads()


def remote_engines() -> RemoteEngines | None:
    return _installed
