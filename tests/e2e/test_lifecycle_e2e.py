"""A server process from start to end: SIGTERM drains, expiry cuts, reload loses nothing, no engine is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.helpers.live_stream import PROTOCOLS, LiveStream
from tests.helpers.server_process import ServerProcess, post, running_server, stop_server, write_mock_model
from tests.helpers.waiting import eventually

MakeServer = Callable[..., ServerProcess]
CUT_OFF = "the exit timeout expired before the request was finished"


def engines(server: ServerProcess) -> list[psutil.Process]:
    """The engines' processes; one engine may have several."""
    return list(psutil.Process(server.process.pid).children(recursive=True))


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def streams(server: ServerProcess, max_tokens: int, tag: str = "") -> list[LiveStream]:
    """Two streams on each protocol."""
    return [
        LiveStream(server, protocol, "slow", f"{tag} {protocol} {number}", max_tokens, f"{protocol}-{number}")
        for protocol in PROTOCOLS
        for number in range(2)
    ]


@pytest.fixture
def slow(make_server: MakeServer, tmp_path: Path) -> Callable[..., ServerProcess]:
    """Starts a server with one model of 20 ms a step."""

    def start(*arguments: str) -> ServerProcess:
        write_mock_model(tmp_path, "slow", mock_step_ms=20)
        return make_server("--model-repository", str(tmp_path), *arguments)

    return start


def test_sigterm_under_load(slow: MakeServer, capfd: pytest.CaptureFixture[str]) -> None:
    server = slow()
    undisturbed = [stream.finish() for stream in streams(server, 60)]
    children = engines(server)
    running = [stream.wait_until_begun() for stream in streams(server, 60)]
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: status(server, "/v2/health/ready") == 503)
    assert status(server, "/v2/health/live") == 503  # golden 52: Triton refuses connections by now
    eventually(lambda: refuses_connections(server.grpc))
    refused = [LiveStream(server, protocol, "slow", "late", 5) for protocol in PROTOCOLS]
    assert [stream.finish() for stream in refused] == [""] * 3
    errors = {protocol: one.error or one.broken for protocol, one in zip(PROTOCOLS, refused, strict=True)}
    assert "Connection refused" in errors.pop("grpc"), "as Triton's test_shutdown_dynamic"
    assert set(errors.values()) == {"Server is stopping"}
    assert post(server, "/v2/models/slow/generate", {"text_input": "x"}) == (503, '{"error":"Server is stopping"}')
    assert post(server, "/v1/completions", {"model": "slow", "prompt": "x"})[0] == 503
    with grpc.insecure_channel(server.grpc) as channel:
        with pytest.raises(grpc.RpcError) as exiting:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerReady(service_pb2.ServerReadyRequest())
        assert exiting.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [stream.finish() for stream in running] == undisturbed
    assert not any(stream.error or stream.broken for stream in running)
    assert server.process.wait(timeout=40) == 0 and gone(children)
    log = capfd.readouterr().err
    assert "Signal (15) received." in log and "successfully unloaded 'slow' version 1" in log
    assert "cut off" not in log and "server stopped" in log


def refuses_connections(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


def status(server: ServerProcess, path: str) -> int:
    connection = http.client.HTTPConnection(server.http, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    connection.close()
    return answer.status


def test_what_outlives_the_exit_timeout_is_cut_with_an_error(
    slow: MakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server = slow("--exit-timeout-secs", "1")
    children = engines(server)
    running = [stream.wait_until_begun() for stream in streams(server, 400)]
    server.process.send_signal(signal.SIGTERM)
    for stream in running:
        assert stream.finish() and CUT_OFF in stream.error and not stream.broken
    assert server.process.wait(timeout=40) == 1 and gone(children)
    log = capfd.readouterr().err
    assert "Exit timeout expired. Exiting immediately." in log
    assert "Model 'slow' (version 1): cut off 6 requests: " in log and "'grpc-1'" in log and "'http-0'" in log
    assert "successfully unloaded 'slow' version 1" in log and "Traceback" not in log


def test_a_second_signal_ends_at_once_also_an_engine_that_hangs(
    slow: MakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server = slow()
    children = engines(server)
    running = LiveStream(server, "http", "slow", "x", 400).wait_until_begun()
    for child in children:
        child.suspend()
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: status(server, "/v2/health/ready") == 503)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=10) == 1
    eventually(lambda: gone(children))
    running.finish()
    assert "Signal (15) received again, exiting at once." in capfd.readouterr().err


def test_no_engine_outlives_a_killed_server(slow: MakeServer) -> None:
    server = slow()
    children = engines(server)
    LiveStream(server, "http", "slow", "x", 400).wait_until_begun()
    server.process.kill()
    eventually(lambda: gone(children))


# Loads as an engine does: it waits for a process of its own.
LOADING_BACKEND = """
import subprocess
from llmbackend.core.backend_api import internal

def TRITONBACKEND_ModelInitialize(model):
    if subprocess.run(["sleep", "600"]).returncode:
        raise internal("the engine ended while the model was loading")

def TRITONBACKEND_ModelInstanceExecute(instance, requests): pass
"""


def write_loading_model(repository: Path) -> None:
    directory = repository / "loading"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text('backend: "loading"')
    (directory / "backend.py").write_text(LOADING_BACKEND)


def test_a_signal_while_models_load(tmp_path: Path) -> None:
    write_mock_model(tmp_path, "mock")
    write_loading_model(tmp_path)
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "--model-repository", str(tmp_path)]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--http-address", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        server = psutil.Process(process.pid)
        eventually(lambda: any(child.name() == "sleep" for child in server.children()))
        children = server.children()
        process.send_signal(signal.SIGTERM)
        output, log = process.communicate(timeout=40)
    assert process.returncode == 0 and gone(children), log
    assert "stopping while models are loading" in log and "server stopped" in log
    assert "is ready after" not in output and "Traceback" not in log


def test_loads_that_hang_hold_up_nothing_else(slow: MakeServer, tmp_path: Path) -> None:
    server = slow("--model-control-mode", "explicit", "--load-model", "slow", "--exit-timeout-secs", "0")
    write_loading_model(tmp_path)
    loads = [threading.Thread(target=load_and_forget, args=(server,), daemon=True) for _ in range(12)]
    for load in loads:
        load.start()
    eventually(lambda: [row["state"] for row in index(server)] == ["LOADING", "READY"])
    assert status(server, "/v2/health/live") == status(server, "/v2/models/slow/ready") == 200
    assert status(server, "/v2/health/ready") == 400 and server.get("/v2/models/slow/stats")
    assert len(LiveStream(server, "http", "slow", "x", 5).finish()) > 0
    children = engines(server)
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert server.process.wait(timeout=40) == 1
    eventually(lambda: gone(children))


def load_and_forget(server: ServerProcess) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        post(server, "/v2/repository/models/loading/load", {})


def test_reload_under_live_streams(slow: MakeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = slow("--model-control-mode", "explicit", "--load-model", "slow")
    undisturbed = [stream.finish() for stream in streams(server, 80)]
    old = engines(server)
    running = [stream.wait_until_begun() for stream in streams(server, 80)]
    (tmp_path / "slow" / "1" / "model.json").write_text(
        json.dumps({"model": "mock", "max_model_len": 512, "mock_step_ms": 1})
    )
    assert post(server, "/v2/repository/models/slow/load", {})[0] == 200
    new = set(engines(server)) - set(old)
    assert new
    after = streams(server, 80)  # these go to the new version, whose steps are shorter
    assert [stream.finish() for stream in after] == undisturbed
    assert any(process.is_running() for process in old), "the old engine still has its streams"
    assert [stream.finish() for stream in running] == undisturbed
    assert not any(stream.error or stream.broken for stream in (*running, *after))
    eventually(lambda: set(engines(server)) == new)  # ended and reaped

    last = LiveStream(server, "http", "slow", " http 0", 80, "stopped by id").wait_until_begun()
    for _ in range(2):
        assert post(server, "/v2/repository/models/slow/unload", {})[0] == 200
    assert post(server, "/v2/repository/models/slow/load", {})[0] == 200  # while the one before drains
    assert last.finish() == undisturbed[0]
    eventually(lambda: len(engines(server)) == len(old))
    assert index(server) == [{"name": "slow", "version": "1", "state": "READY"}]
    assert stop_server(server) == 0
    assert capfd.readouterr().err.count("successfully unloaded 'slow' version 1") == 3


def index(server: ServerProcess) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(post(server, "/v2/repository/index", {})[1])
    return rows


@pytest.fixture(scope="module")
def tiny() -> Iterator[ServerProcess]:
    """The mock model as a single checkpoint, for tests that leave the server as it is."""
    with running_server("--model", "mock", "--model-name", "tiny") as server:
        yield server


def test_single_checkpoint_is_served_under_a_name(tiny: ServerProcess) -> None:
    assert json.loads(tiny.get("/v1/models"))["data"][0]["id"] == "tiny"


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
    assert run.returncode == 2
    assert "config.json" in run.stderr


def test_a_taken_port_ends_with_the_reason_before_a_model_is_loaded(tiny: ServerProcess) -> None:
    port = tiny.http.partition(":")[2]
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "--model", "mock", "--http-address", "127.0.0.1"]
    command += ["--http-port", port, "--grpc-port", "0", "--metrics-port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    taken = f"cannot listen: [Errno 98] Address already in use: 127.0.0.1:{port}"
    assert f"{taken}, held by process {tiny.process.pid} (" in run.stderr
    assert f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{port}' already in use" in run.stderr
    assert "Traceback" not in run.stderr and "loading" not in run.stderr.lower()


def cpu_seconds(server: ServerProcess) -> float:
    """CPU time of the server and its engines."""
    times = [process.cpu_times() for process in (psutil.Process(server.process.pid), *engines(server))]
    return float(sum(one.user + one.system for one in times))


def test_an_idle_server_uses_no_cpu(tiny: ServerProcess) -> None:
    time.sleep(0.5)
    before_s = cpu_seconds(tiny)
    time.sleep(3)
    assert cpu_seconds(tiny) - before_s <= 0.06
