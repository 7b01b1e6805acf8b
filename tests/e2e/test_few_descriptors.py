"""A server that may open 64 files: clients that hold connections take none from its engines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import psutil

from tests.helpers.server_process import ServerProcess, post, start_server, stop_server, write_mock_model
from tests.helpers.waiting import eventually

BODY = {"text_input": "a b c", "max_tokens": 4, "seed": 1}


def engine_pids(server: ServerProcess) -> list[int]:
    fork_servers = psutil.Process(server.process.pid).children()
    return [engine.pid for fork_server in fork_servers for engine in fork_server.children()]


def has_clients(server: ServerProcess) -> bool:
    """A connection that its client has closed is one until the server has noticed it."""
    return any(one.raddr for one in psutil.Process(server.process.pid).net_connections("tcp"))


def hold(address: str, count: int) -> contextlib.ExitStack:
    """Connections that say nothing."""
    host, port = address.split(":")
    held = contextlib.ExitStack()
    for _ in range(count):
        held.enter_context(socket.create_connection((host, int(port)), timeout=10))
    return held


def test_idle_clients_leave_descriptors_for_an_engine(tmp_path: Path) -> None:
    write_mock_model(tmp_path / "models", max_engine_failures=2)
    with (tmp_path / "log").open("w") as log:
        server = start_server("--model-repository", str(tmp_path / "models"), log=log, setup="ulimit -n 64")
    before = post(server, "/v2/models/mock/generate", BODY)
    (engine,) = engine_pids(server)
    with hold(server.grpc, 50), hold(server.http, 200):
        os.kill(engine, signal.SIGKILL)
        eventually(lambda: engine_pids(server) not in ([], [engine]))
    eventually(lambda: not has_clients(server))
    assert post(server, "/v2/models/mock/generate", BODY) == before
    assert stop_server(server) == 0
    text = (tmp_path / "log").read_text()
    assert "the limit of 64 open files" in text and "refusing connections: " in text
    assert "Too many open files" not in text
