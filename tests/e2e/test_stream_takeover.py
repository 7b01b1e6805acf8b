"""Resumable streams of a host that is killed, or told to stop, go on in another host's process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from tests.helpers.numbered_events import Event, read_events
from tests.helpers.server_process import write_mock_model

pytestmark = pytest.mark.slow
TOKENS = 150
BODY: dict[str, Any] = {
    "model": "mock", "prompt": "one two", "stream": True, "max_tokens": TOKENS, "temperature": 1, "seed": 3,
    "ignore_eos": True, "allowed_token_ids": list(range(97, 123)), "stream_options": {"include_usage": True},
}  # fmt: skip
PATH = "/v1/completions"


@dataclass
class Host:
    process: subprocess.Popen[str]
    client: httpx.Client
    endpoint: str

    def tell(self, hosts: dict[str, Host]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([[name, host.endpoint] for name, host in hosts.items()]) + "\n")
        self.process.stdin.flush()

    def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait(60)

    def read(self, body: Any, headers: dict[str, str], at_most: int = 1 << 30) -> list[Event]:
        return read_events(self.client, PATH, body, headers, at_most)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, Host]]:
    write_mock_model(tmp_path / "models", "mock", mock_step_ms=10)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with tempfile.TemporaryDirectory() as short:  # paths of sockets are short
        started = {name: _started(Path(short), name, tmp_path / "models", public, secret) for name in ("a", "b")}
        hosts = {name: _serving(Path(short) / name, process) for name, process in started.items()}
        for host in hosts.values():
            host.tell(hosts)
        yield hosts
        for host in hosts.values():
            host.client.close()
            if host.process.poll() is None:
                host.end(signal.SIGTERM)
            assert host.process.stdin is not None and host.process.stdout is not None
            host.process.stdin.close()
            host.process.stdout.close()


def _started(root: Path, name: str, models: Path, public: str, secret: str) -> subprocess.Popen[str]:
    (root / name).mkdir(mode=0o700)
    order = {"id": name, "folder": str(root / name), "repository": str(models), "public": public, "secret": secret}
    command = [sys.executable, "-m", "tests.helpers.member_process", json.dumps(order)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _serving(folder: Path, process: subprocess.Popen[str]) -> Host:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving "):
            transport = httpx.HTTPTransport(uds=str(folder / "http.sock"))
            client = httpx.Client(base_url="http://host", transport=transport, timeout=60)
            return Host(process, client, line.split()[1])
    raise AssertionError(f"the host ended with {process.wait()}")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_streams_go_on_in_the_other_host(hosts: dict[str, Host], how: signal.Signals) -> None:
    a, b = hosts["a"], hosts["b"]
    resumable = {"X-Resumable-Stream": "true"}
    whole = a.read(BODY, resumable)
    begun = [a.read(BODY, resumable, at_most) for at_most in (1, 7, 30)]
    unseeded = a.read(BODY | {"seed": None}, resumable, 12)
    a.end(how)
    for some in begun:
        rest = b.read({}, {"Last-Event-ID": some[-1][0]})
        assert _said(some + rest) == _said(whole)
    of_unseeded = unseeded + b.read({}, {"Last-Event-ID": unseeded[-1][0]})
    assert of_unseeded == b.read({}, {"Last-Event-ID": unseeded[0][0].partition(":")[0]})
    assert len(of_unseeded) == len(whole) and of_unseeded[-1][1] == "[DONE]"
    assert b.read({}, {"Last-Event-ID": whole[100][0]}) == whole[101:], "it had ended when its host did"


def _said(events: list[Event]) -> list[Any]:
    """Without what differs from one stream to the next."""
    numbers = [id.partition(":")[2] for id, _ in events]
    datas = [data if data == "[DONE]" else json.loads(data) for _, data in events]
    for data in datas:
        if isinstance(data, dict):
            del data["id"], data["created"]
            if data.get("usage"):
                data["usage"].pop("prompt_tokens_details", None)  # how much of the prompt a cache had
    return [numbers, datas]
