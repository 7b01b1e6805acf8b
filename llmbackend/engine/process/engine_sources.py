"""Where a supervisor's engines come from: fork servers of this process, or a cluster.

For: supervisors. Does not know: when an engine is due, what its loss means. Engines of one config share a fork server,
so that what it holds, weights among it, exists once. Invariants: a source gives one transport at a time, and holds
nothing after `close`; a fork server ends with the last engine's supervisor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy

from ..config import EngineConfig
from ..errors import EngineDeadError
from ..start.load_progress import LoadProgress
from .engine_link import Transport
from .transport import EngineForkServer, make_transport


@dataclass
class _Shared:
    server: EngineForkServer
    num_users: int = 0


class ForkServers:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[bytes, _Shared] = {}

    def acquire(self, config: EngineConfig, runners: str) -> EngineForkServer:
        """The fork server of this config; `release` it in the end."""
        with self._lock:
            key = _key(config, runners)
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(EngineForkServer(config, runners))
            shared.num_users += 1
            return shared.server

    def release(self, server: EngineForkServer) -> None:
        with self._lock:
            key = _key(server.config, server.runners)
            shared = self._shared[key]
            shared.num_users -= 1
            if shared.num_users:
                return
            del self._shared[key]
        server.close()


def _key(config: EngineConfig, runners: str) -> bytes:
    return runners.encode() + msgspec.json.encode(config, order="sorted")


FORK_SERVERS: Final = ForkServers()


class EngineSource(Protocol):
    """The supervisor's thread uses it."""

    def make_transport(self, wake_fd: int, progress: Callable[[LoadProgress], None]) -> Transport | None:
        """To the next engine, not launched yet; None = there is none now, and a wake-up tells when that may have
        changed. Raises what making one raises."""

    def load_whole(self) -> bool:
        """Engines load the checkpoint themselves from now on. Whether they did not before."""

    def lost(self, error: EngineDeadError) -> None:
        """The engine of the last transport cannot be used any more."""

    def close(self) -> None: ...


class ForkedEngines:
    """Children of this process, or threads. Those of one config share a fork server, from the first launch on."""

    def __init__(self, config: EngineConfig, runners: str, policy: HostPolicy = NO_POLICY) -> None:
        """policy: what their processes are bound to"""
        self._config = config
        self._policy = policy
        self._runners = runners
        self.fork_server: EngineForkServer | None = None

    def make_transport(self, wake_fd: int, progress: Callable[[LoadProgress], None]) -> Transport:
        self.fork_server = self.fork_server or FORK_SERVERS.acquire(self._config, self._runners)
        return make_transport(self.fork_server, wake_fd, progress, self._policy)

    def load_whole(self) -> bool:
        assert self.fork_server is not None
        was_whole, self.fork_server.is_whole = self.fork_server.is_whole, True
        return not was_whole

    def lost(self, error: EngineDeadError) -> None:
        """The fork server knows."""

    def close(self) -> None:
        if self.fork_server is not None:
            FORK_SERVERS.release(self.fork_server)
            self.fork_server = None
