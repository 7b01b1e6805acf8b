"""SIGHUP: keys, their limits and certificates of a running server are read again, and open connections go on."""

from __future__ import annotations

import signal
import socket
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers.server_process import start_server, stop_server
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow


def serial_of(address: str, ca: str) -> int:
    """Of the certificate that a new connection is shown."""
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return int(str((connection.getpeercert() or {})["serialNumber"]), 16)


def test_keys_and_certificates_are_read_again_at_sighup(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, certificate, key = (str(tmp_path / name) for name in ("ca.pem", "server.pem", "server.key"))
    authority.cert_pem.write_to_path(ca)

    def renew() -> None:
        made = authority.issue_cert("127.0.0.1")
        made.cert_chain_pems[0].write_to_path(certificate)
        made.private_key_pem.write_to_path(key)

    renew()
    keys = tmp_path / "keys.txt"
    keys.write_text("alice:sk-alice\n")
    log_path = tmp_path / "log"
    with log_path.open("w") as log:
        server = start_server(
            "--model=mock",
            *(f"--api-key-file={keys}", f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}"),
            *("--grpc-use-ssl=1", f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"),
            log=log,
        )

    def status(api_key: str) -> int:
        headers = {"Authorization": f"Bearer {api_key}"}
        with httpx.Client(verify=ssl.create_default_context(cafile=ca)) as client:
            return client.get(f"https://{server.http}/v2", headers=headers).status_code

    credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes())
    with grpc.secure_channel(server.grpc, credentials) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        before = serial_of(server.http, ca)
        assert serial_of(server.grpc, ca) == before and (status("sk-alice"), status("sk-bob")) == (200, 401)

        renew()
        keys.write_text("bob:sk-bob rpm=5\n")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: serial_of(server.http, ca) != before)
        after = serial_of(server.http, ca)
        assert serial_of(server.grpc, ca) == after and (status("sk-alice"), status("sk-bob")) == (401, 200)
        assert "read again: API keys, HTTP certificate, gRPC certificate" in log_path.read_text()

        Path(key).write_text("no key")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: log_path.read_text().count("the previous content remains in use") == 2)
        assert serial_of(server.http, ca) == serial_of(server.grpc, ca) == after
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    assert stop_server(server) == 0
