"""Server: a real child process that is ready when it exists, and that ends with the program."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as grpc_client

from llmbackend import Server
from llmbackend.server.process import READY_DESCRIPTOR, report_ready, take_ready_descriptor
from tests.helpers.server_process import write_mock_model
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow
KILLED = """
import os, signal, sys
from llmbackend import Server
server = Server(model_repository=sys.argv[1], grpc_port=None, metrics_port=None)
print(server._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_mock_model(tmp_path / "repository", transport="inline")
    return tmp_path / "repository"


def test_a_server_is_ready_until_it_is_closed(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with Server(model_repository=repository, log_file=log, arguments=["--id=embedded"]) as server:
        with urllib.request.urlopen(f"{server.http_url}/v2") as answer:
            assert b'"embedded"' in answer.read()
        with urllib.request.urlopen(server.metrics_url) as answer:
            assert answer.status == 200
        with grpc_client.InferenceServerClient(server.grpc_url) as client:
            assert client.is_model_ready("mock")
        assert server.exit_code is None
    assert server.exit_code == 0 and server.close() == 0
    assert "Started HTTPService" in log.read_text()


def test_a_server_that_does_not_start_says_why(repository: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2; the end of its log:\n(.|\n)*does not exist"):
        Server(model_repository="/nowhere")
    with pytest.raises(RuntimeError, match=r"not ready after 0\.001 s"):
        Server(model_repository=repository, start_timeout_s=0.001)


def test_a_server_ends_when_its_program_is_killed(repository: Path) -> None:
    program = subprocess.run([sys.executable, "-c", KILLED, repository], capture_output=True, text=True, timeout=60)
    pid = int(program.stdout)
    eventually(lambda: not Path(f"/proc/{pid}").exists(), 20)


def test_readiness_is_told_once_to_who_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(READY_DESCRIPTOR, str(writer))
    descriptor = take_ready_descriptor()
    assert descriptor == writer and take_ready_descriptor() is None
    report_ready(descriptor, {"http": "http://127.0.0.1:1"})
    with open(reader) as pipe:
        assert pipe.read() == '{"http": "http://127.0.0.1:1"}\n'
    report_ready(None, {})
    for wrong in ("x", "99999"):
        monkeypatch.setenv(READY_DESCRIPTOR, wrong)
        assert take_ready_descriptor() is None
        assert f"is '{wrong}', expected the number of an open descriptor" in caplog.text
