"""Where a supervisor's engines come from: fork servers of this process, or a cluster.

For: supervisors. Does not know: when an engine is due, what its loss means. Invariant: a source gives one transport at
a time, and holds nothing after `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy

from ..config import EngineConfig
from ..errors import EngineDeadError
from ..load_progress import LoadProgress
from .engine_link import Transport
from .fork_servers import FORK_SERVERS
from .transport import EngineForkServer, make_transport


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
