"""What golden 50 and 54 show, beside a real server: health while models load, and starts that fail.

Golden 52 and 53 (SIGTERM, the exit timeout) are test_lifecycle_e2e's: this host ends streams with an error where Triton
breaks the connection, and answers 503 where Triton refuses it.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers.waiting import eventually

WAIT_S = 40.0

# Loads when the file `go` is there; an answer takes as long as the file `hold` is.
BACKEND = """
import time
from pathlib import Path
from llmbackend.core.backend_api import ResponseFlag, Tensor, internal

def TRITONBACKEND_ModelInitialize(model):
    (model.directory.parent.parent / "loading").touch()
    deadline_s = time.monotonic() + 30
    while not (model.directory.parent.parent / "go").exists():
        if time.monotonic() > deadline_s: raise internal("the test is gone")
        time.sleep(0.01)

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        response = request.new_response()
        x = request.inputs["X"]
        response.add_output(Tensor("Y", x.datatype, x.shape, x.data))
        response.send(ResponseFlag.FINAL)
        request.release()
"""
CONFIG = """
backend: "slow"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
INFER = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}
PATHS = ("/v2/health/live", "/v2/health/ready", "/v2/models/slow/ready")


class Slow:
    """A server with the model `slow`, started without waiting for it."""

    def __init__(self, root: Path, *arguments: str) -> None:
        with socket.socket() as one, socket.socket() as two:
            for each in (one, two):
                each.bind(("127.0.0.1", 0))
            self.http, self.grpc = (each.getsockname()[1] for each in (one, two))
        self.root = root
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "llmbackend.cli", "serve", "--model-repository", str(root / "models")),
                *("--model-control-mode=explicit", "--load-model=slow", "--allow-metrics=false"),
                *("--http-address=127.0.0.1", f"--http-port={self.http}"),
                *("--grpc-address=127.0.0.1", f"--grpc-port={self.grpc}", *arguments),
            ],
            stdout=subprocess.DEVNULL,
        )

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Status 0 when the connection is refused."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=WAIT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except ConnectionRefusedError:
            return 0, ""
        finally:
            connection.close()

    def health(self) -> list[int]:
        return [self.ask("GET", path)[0] for path in PATHS]

    def index(self) -> object:
        return json.loads(self.ask("POST", "/v2/repository/index", {})[1])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Loads begin and do not end."""
        (self.root / "go").unlink(missing_ok=True)
        (self.root / "loading").unlink(missing_ok=True)
        yield
        (self.root / "go").touch()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While a load request is under way."""
        with self.held():
            load = threading.Thread(target=self.ask, args=("POST", "/v2/repository/models/slow/load", {}))
            load.start()
            eventually((self.root / "loading").exists)
            yield
        load.join(WAIT_S)
        assert not load.is_alive()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    directory = tmp_path / "models" / "slow"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(CONFIG)
    (directory / "backend.py").write_text(BACKEND)
    server = Slow(tmp_path)
    yield server
    (tmp_path / "go").touch()
    server.process.terminate()
    assert server.process.wait(WAIT_S) == 0


def test_golden_50_health_while_models_load(slow: Slow) -> None:
    eventually((slow.root / "loading").exists)
    assert slow.health() == [0, 0, 0], "endpoints open only after the startup models have loaded"
    (slow.root / "go").touch()
    eventually(lambda: slow.health() == [200, 200, 200])
    with grpc.insecure_channel(f"127.0.0.1:{slow.grpc}") as channel:
        for service in ("", "nosuch"):
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
            assert health.status == health_pb2.HealthCheckResponse.SERVING

    (slow.root / "models" / "slow" / "1" / "weights").touch()
    with slow.loading():  # a reload: the old version serves
        assert slow.health() == [200, 200, 200]
        assert slow.index() == [{"name": "slow", "version": "1", "state": "READY"}]
        assert slow.ask("POST", "/v2/models/slow/infer", INFER) == (
            200,
            '{"model_name":"slow","model_version":"1","outputs":[{"name":"Y","datatype":"FP32","shape":[1],"data":[1.0]}]}',
        )

    assert slow.ask("POST", "/v2/repository/models/slow/unload", {})[0] == 200
    unloaded = [{"name": "slow", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]
    eventually(lambda: slow.index() == unloaded)
    with slow.loading():  # a first load
        assert slow.health() == [200, 400, 400]
        assert slow.index() == [{"name": "slow", "version": "1", "state": "LOADING"}]
        assert slow.ask("POST", "/v2/models/slow/infer", INFER) == (
            404,
            '{"error":"Request for unknown model: \'slow\' has no available versions"}',
        )
    assert slow.health() == [200, 200, 200]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--exit-on-error=false"], [200, 400, 200]),
        (["--exit-on-error=false", "--strict-readiness=false"], [200, 200, 200]),
    ],
)
def test_golden_54_a_failed_startup_model(tmp_path: Path, options: list[str], expected: list[int]) -> None:
    write_pair(tmp_path)
    server = Slow(tmp_path, "--load-model=bad", *options)
    try:
        eventually(lambda: server.health() == expected)
    finally:
        server.process.terminate()
        assert server.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("model", ["bad", "nosuch"])
def test_golden_54_a_failed_start_ends_with_exit_code_1(
    tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pair(tmp_path)
    server = Slow(tmp_path, f"--load-model={model}")
    assert server.process.wait(WAIT_S) == 1
    log = capfd.readouterr().err.rstrip()
    assert "Found 0 model versions that have in-flight inferences" in log
    assert "Found 0 live models and 0 in-flight non-inference requests" in log
    *_, triton, blank, last = log.splitlines()
    assert (triton, blank) == ("error: creating server: Internal - failed to load all models", "")
    assert last.startswith(f"Model '{model}' was not loaded: ")
    assert ("no weights" if model == "bad" else "is in no model repository") in last


def write_pair(root: Path) -> None:
    """`slow`, which loads at once here, and `bad`, which does not load."""
    (root / "go").touch()
    for name, source in (("slow", BACKEND), ("bad", 'raise RuntimeError("no weights")')):
        directory = root / "models" / name
        (directory / "1").mkdir(parents=True)
        (directory / "config.pbtxt").write_text(CONFIG.replace("slow", name))
        (directory / "backend.py").write_text(source)
