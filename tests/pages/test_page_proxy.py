"""The pages on the HTTP port of a real server: who gets them, and the life of their process."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import psutil
import pytest

from tests.helpers.server_process import ServerProcess, running_server, start_server, stop_server, write_mock_model
from tests.helpers.waiting import eventually

pytest.importorskip("nicegui")
pytestmark = pytest.mark.slow

HTML = {"accept": "text/html"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_mock_model(repository)
    server = start_server("--model-repository", str(repository))
    try:
        yield server
    finally:
        pages = page_processes(server)
        assert stop_server(server) == 0
        assert not any(process.is_running() for process in pages)


def page_processes(server: ServerProcess) -> list[psutil.Process]:
    """Those that the server has not yet waited for have no command line."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.Error):
            found += [child] * ("llmbackend.pages.main" in child.cmdline())
    return found


def get(server: ServerProcess, path: str, headers: dict[str, str], method: str = "GET") -> tuple[HTTPResponse, str]:
    with closing(HTTPConnection(server.http, timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode(errors="replace")


def upgrade(server: ServerProcess, path: str, headers: dict[str, str]) -> str:
    """The first bytes of the answer to a request for a websocket."""
    host, _, port = server.http.partition(":")
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode())
        return connection.recv(4096).decode("latin-1")


def websocket_headers(host: str, origin: str) -> dict[str, str]:
    return {
        "Host": host,
        "Origin": origin,
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }


def test_without_a_viewer_there_is_no_process(server: ServerProcess) -> None:
    response, _ = get(server, "/chat", {})
    assert response.status == 404
    refused, text = get(server, "/chat", {**HTML, "Host": "evil.example"})
    assert refused.status == 403 and "evil.example" in text
    assert page_processes(server) == []


def test_a_page_comes_with_a_policy_that_lets_only_its_own_scripts_run(server: ServerProcess) -> None:
    response, text = get(server, "/chat", HTML)
    policy = response.headers["content-security-policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert response.status == 200
    assert text.count("<script") == text.count(f'<script nonce="{nonce}"') > 0
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "'unsafe-inline'; img" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    other, _ = get(server, "/chat", HTML)
    assert nonce not in other.headers["content-security-policy"]


def test_head_gives_the_headers_of_get(server: ServerProcess) -> None:
    response, text = get(server, "/favicon.ico", {}, "HEAD")
    assert (response.status, text) == (200, "")
    assert response.headers["content-length"] == get(server, "/favicon.ico", {})[0].headers["content-length"]


def test_a_websocket_of_the_pages_is_handed_on_and_one_of_another_site_refused(server: ServerProcess) -> None:
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    assert upgrade(server, path, websocket_headers(server.http, f"http://{server.http}")).startswith("HTTP/1.1 101 ")
    refused = upgrade(server, path, websocket_headers(server.http, "https://evil.example"))
    assert refused.startswith("HTTP/1.1 403 ") and "evil.example" in refused
    rebound = upgrade(server, path, websocket_headers("evil.example", "http://evil.example"))
    assert rebound.startswith("HTTP/1.1 403 ")
    without = websocket_headers(server.http, "")
    del without["Origin"]
    assert "has no Origin" in upgrade(server, path, without)


def test_socket_io_without_a_websocket_is_not_served(server: ServerProcess) -> None:
    response, _ = get(server, "/_nicegui_ws/socket.io/?EIO=4&transport=polling", HTML)
    assert response.status == 404


def test_a_process_that_dies_is_started_again(server: ServerProcess) -> None:
    get(server, "/chat", HTML)
    (before,) = page_processes(server)
    before.kill()
    eventually(lambda: not page_processes(server), 10)
    response, text = get(server, "/chat", HTML)
    assert response.status == 200, text
    assert page_processes(server) != [before]


def test_the_process_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    write_mock_model(tmp_path)
    server = start_server("--model-repository", str(tmp_path))
    get(server, "/chat", HTML)
    (pages,) = page_processes(server)
    os.kill(server.process.pid, signal.SIGKILL)
    stop_server(server)
    eventually(lambda: not pages.is_running() or pages.status() == psutil.STATUS_ZOMBIE, 20)


def test_pages_can_be_switched_off(tmp_path: Path) -> None:
    write_mock_model(tmp_path)
    with running_server("--model-repository", str(tmp_path), "--allow-pages=false") as server:
        response, _ = get(server, "/chat", HTML)
        assert response.status == 404
        answer = upgrade(server, "/_nicegui_ws/socket.io/", websocket_headers(server.http, f"http://{server.http}"))
        assert answer.startswith("HTTP/1.1 404 ")
