"""What is checked before a machine joins a head, and that only the node itself is ended. Without Ray."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from llmbackend.cluster import ray_node
from llmbackend.cluster.ray_node import RAY_ADDRESS, NodeRecord, RayNode, check_head, ray_environment
from llmbackend.cluster.secrets_folder import SecretsFolder
from llmbackend.cluster.settings import ClusterError, ClusterSettings
from tests.helpers.waiting import eventually


@pytest.fixture
def secrets(tmp_path: Path) -> SecretsFolder:
    return SecretsFolder.create(tmp_path / "secrets")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_head_is_recognised_by_its_certificate(tmp_path: Path, secrets: SecretsFolder, address: str) -> None:
    environment = ray_environment(secrets, tmp_path, address)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=environment["RAY_TLS_CA_CERT"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(environment["RAY_TLS_SERVER_CERT"], environment["RAY_TLS_SERVER_KEY"])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {address}")

    def serve() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True):
            pass

    serving = threading.Thread(target=serve, daemon=True)
    with listener:
        serving.start()
        port = listener.getsockname()[1]
        check_head(f"[{address}]:{port}" if ":" in address else f"{address}:{port}", environment)
        serving.join()


def test_a_node_that_does_not_start_again_is_still_this_servers(
    tmp_path: Path, secrets: SecretsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the engines of its predecessor would outlive the server."""
    monkeypatch.delenv(RAY_ADDRESS, raising=False)
    monkeypatch.setattr(ray_node, "_PROGRAM", "llmbackend.cluster.no_program")
    node = RayNode(ClusterSettings(address="auto", run_folder=tmp_path / "run"), secrets)
    with pytest.raises(ClusterError, match=r"(?s)did not start \(exit code 1\):.*No module named"):
        node.ensure()
    assert not node.pid
    node.address = "127.0.0.1:6379"  # as after a start
    with pytest.raises(ClusterError, match="did not start"):
        node.ensure()
    assert node.pid and not node.is_running()
    # Another server with the same run folder starts one.
    with subprocess.Popen([sys.executable, "-c", "input()", ray_node._PROGRAM], stdin=subprocess.PIPE) as other:
        # Popen returns when the new program has the process, a moment before /proc has its command line.
        eventually(Path(f"/proc/{other.pid}/cmdline").read_bytes)
        record = NodeRecord(other.pid, "127.0.0.1:6379")
        (tmp_path / "run" / "node.json").write_bytes(msgspec.json.encode(record))
        node.ensure()
        assert (node.pid, node.address, node.is_running()) == (other.pid, record.address, True)
        node.end()
        assert other.wait(60) == -signal.SIGTERM and not node.pid


def test_a_process_that_has_an_ended_nodes_id_is_left_alone(
    tmp_path: Path, secrets: SecretsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RAY_ADDRESS, raising=False)
    node = RayNode(ClusterSettings(address="auto", run_folder=tmp_path / "run"), secrets)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        node.pid = other.pid
        node.end()
        assert other.poll() is None and node.pid == 0
        other.kill()
