"""Where protocols listen.

For: the settings of a server process and of its frontend processes. Does not know: protocols, sockets. Invariant:
endpoints that exist are well-formed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Endpoint:
    """Where one protocol listens."""

    address: str
    port: int
    """0: any free one."""
    enabled: bool = True
    reuse_port: bool = False
    """Other servers that allow it too may listen on the port."""

    @property
    def port_or_none(self) -> int | None:
        return self.port if self.enabled else None

    @property
    def address_or_none(self) -> str | None:
        return self.address if self.enabled else None


def check_port_collision(endpoints: Mapping[str, Endpoint]) -> None:
    """Raises ValueError with Triton's text, naming the protocols. Port 0 is any free one, and never collides; a port
    that another process has is found when it is bound. Source: CheckPortCollision in Triton's command_line_parser."""
    used = [(name, endpoint) for name, endpoint in endpoints.items() if endpoint.enabled and endpoint.port]
    for (one, first), (other, second) in combinations(used, 2):
        if (first.address, first.port) == (second.address, second.port):
            raise ValueError(
                f"The server cannot listen to {one} requests and {other} requests at the same address and port "
                f"{first.address}:{first.port}"
            )
