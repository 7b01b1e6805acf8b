"""A server process from start to end: SIGTERM drains, a single checkpoint is served by name, idle means idle."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import ServerProcess, stop_server, write_mock_model

MakeServer = Callable[..., ServerProcess]


def test_sigterm_lets_a_running_stream_finish(make_server: MakeServer, tmp_path: Path) -> None:
    write_mock_model(tmp_path, "slow", mock_step_ms=20)
    server = make_server("--model-repository", str(tmp_path))
    connection = http.client.HTTPConnection(server.http, timeout=60)
    body = {"text_input": "x", "stream": True, "parameters": {"max_tokens": 60, "ignore_eos": True}}
    connection.request("POST", "/v2/models/slow/generate_stream", json.dumps(body))
    answer = connection.getresponse()
    first = answer.readline()
    server.process.send_signal(signal.SIGTERM)
    rest = answer.read().decode()
    connection.close()
    events = [line for line in rest.splitlines() if line.startswith("data: ")]
    assert first.startswith(b"data: ")
    assert "error" not in rest and len(events) >= 10
    assert server.process.wait(timeout=40) == 0


def test_new_work_is_refused_while_draining(make_server: MakeServer, tmp_path: Path) -> None:
    write_mock_model(tmp_path, "slow", mock_step_ms=20)
    server = make_server("--model-repository", str(tmp_path))
    connection = http.client.HTTPConnection(server.http, timeout=60)
    body = {"text_input": "x", "stream": True, "parameters": {"max_tokens": 100, "ignore_eos": True}}
    connection.request("POST", "/v2/models/slow/generate_stream", json.dumps(body))
    connection.getresponse()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises((urllib.error.HTTPError, urllib.error.URLError, ConnectionError)):
        server.get("/v2/health/ready")
    connection.close()
    assert server.process.wait(timeout=40) == 0


def test_single_checkpoint_is_served_under_a_name(make_server: MakeServer) -> None:
    server = make_server("--model", "mock", "--model-name", "tiny")
    assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "tiny"
    assert stop_server(server) == 0


def test_a_missing_checkpoint_ends_with_the_reason(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "llmbackend.cli",
            "serve",
            "--model",
            str(tmp_path),
            "--http-port",
            "0",
            "--grpc-port",
            "0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "config.json" in run.stderr


def test_a_taken_port_ends_with_the_reason(make_server: MakeServer) -> None:
    server = make_server("--model", "mock")
    port = server.http.partition(":")[2]
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "--model", "mock", "--http-address", "127.0.0.1"]
    command += ["--http-port", port, "--grpc-port", "0", "--metrics-port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert f"127.0.0.1', {port}" in run.stderr and "Traceback" not in run.stderr
    assert stop_server(server) == 0


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_seconds(int(child)) for child in children)


def test_an_idle_server_uses_no_cpu(make_server: MakeServer, tmp_path: Path) -> None:
    write_mock_model(tmp_path, "mock")
    server = make_server("--model-repository", str(tmp_path))
    time.sleep(0.5)
    before_s = cpu_seconds(server.process.pid)
    time.sleep(3)
    assert cpu_seconds(server.process.pid) - before_s <= 0.06
    assert stop_server(server) == 0


def test_no_process_is_left_behind(make_server: MakeServer, tmp_path: Path) -> None:
    write_mock_model(tmp_path, "mock")
    server = make_server("--model-repository", str(tmp_path))
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children, "the engine runs in a process of its own"
    assert stop_server(server) == 0
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
