"""Refuses a command line that gives two protocols one port, before anything is loaded.

For: the command line. Does not know: sockets; a port that another process has is found when it is bound. Source:
CheckPortCollision in Triton's command_line_parser.cc; golden transcript 54.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from .settings import Endpoint


def check_port_collision(endpoints: Mapping[str, Endpoint]) -> None:
    """Raises ValueError with Triton's text, naming the protocols. Port 0 is any free one, and never collides."""
    used = [(name, endpoint) for name, endpoint in endpoints.items() if endpoint.enabled and endpoint.port]
    for (one, first), (other, second) in combinations(used, 2):
        if (first.address, first.port) == (second.address, second.port):
            raise ValueError(
                f"The server cannot listen to {one} requests and {other} requests at the same address and port "
                f"{first.address}:{first.port}"
            )
