"""A real server process, for tests over real sockets with real clients."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.helpers.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class ServerProcess:
    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, model: str) -> float:
        """Sum of a metric's samples of one model."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        samples = re.findall(rf'^{name}\{{[^}}]*model="{model}"[^}}]*\}} (\S+)$', text, re.MULTILINE)
        assert samples, f"no metric {name} of model {model}"
        return sum(float(value) for value in samples)

    def wait_until_idle(self, model: str, timeout_s: float = 20.0) -> None:
        """Until the engine holds no request and no KV block of `model`."""
        held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        eventually(lambda: not any(self.metric(f"vllm:{name}", model) for name in held), timeout_s)


def start_server(
    *arguments: str,
    log: IO[str] | None = None,
    setup: str = "",
    http_port: int = 0,
    metrics_port: int = 0,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    program: str = "llmbackend.cli",
) -> ServerProcess:
    """Starts `llmbackend serve` on free loopback ports and waits until it says where it listens.

    log: where its standard error goes; to ours by default. setup: what a shell does before it becomes the server.
    http_port, metrics_port: 0 = a free one. folder: that it works in; ours by default. variables: of its environment,
    beside ours. program: a module.
    """
    command = [sys.executable, "-m", program, "serve", *arguments]
    for protocol, port in {"http": http_port, "grpc": 0, "metrics": metrics_port}.items():
        command += [f"--{protocol}-address", "127.0.0.1", f"--{protocol}-port", str(port)]
    if setup:
        command = ["sh", "-c", f'{setup} && exec "$@"', "sh", *command]
    environment = os.environ | {"NO_COLOR": "1"} | dict(variables or {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=folder)
    assert process.stdout is not None
    found: dict[str, str] = {}
    for line in process.stdout:
        if match := re.match(r"(http|grpc|metrics)\s+\S*?([0-9.]+:\d+)", line):
            found[match[1]] = match[2]
        if len(found) == 3:
            return ServerProcess(process, **found)
    process.stdout.close()
    raise AssertionError(f"the server ended with exit code {process.wait()}")


def stop_server(server: ServerProcess) -> int:
    server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(timeout=40)
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


@contextmanager
def running_server(*arguments: str, **options: Any) -> Iterator[ServerProcess]:
    """As `start_server`; ends with exit code 0."""
    server = start_server(*arguments, **options)
    try:
        yield server
    finally:
        assert stop_server(server) == 0


def kill_server(server: ServerProcess) -> None:
    """As a crash would end it; what belongs to it ends by itself."""
    server.process.kill()
    server.process.wait()
    assert server.process.stdout is not None
    server.process.stdout.close()


def write_mock_model(repository: Path, name: str = "mock", **engine_args: object) -> None:
    """A model of the `llm` backend on the mock model: real engine process, real paging, no weights."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({"model": "mock", "max_model_len": 512, **engine_args}))
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')


def post(server: ServerProcess, path: str, body: Any) -> tuple[int, str]:
    """Status and text of the answer to a JSON body (bytes go out as they are)."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(server.http, timeout=60)) as connection:
        connection.request("POST", path, payload, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
