"""The fork servers of this process's engines: one for each config, shared by all engines that have it.

For: supervisors. Does not know: engines. Why: what a fork server holds, weights among it, is then there once, however
many engines of a model there are. Invariant: a server ends with the last engine's supervisor.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import msgspec

from ..config import EngineConfig
from .transport import EngineForkServer


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
