"""Clients that write HTTP by hand: HTTP/1.0, half-closed connections, slashes behind paths."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from tests.helpers.kserve_runner import Running
from tests.helpers.waiting import eventually


def connect(running: Running) -> socket.socket:
    host, port = running.http.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def post(path: str, words: str, version: str = "1.1") -> bytes:
    body = json.dumps({"text_input": words, "stream": path.endswith("stream")}).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received


STREAM, WHOLE = "/v2/models/llm/generate_stream", "/v2/models/llm/generate"


def test_a_stream_to_an_http_1_0_client_ends_with_the_connection(running: Running) -> None:
    with connect(running) as connection:
        connection.sendall(post(STREAM, "n=3 sleep=1", "1.0"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head.lower()
    assert b"transfer-encoding" not in head.lower() and b"content-length" not in head.lower()
    events = body.split(b"\n\n")
    assert events.pop() == b"" and len(events) >= 3
    assert all(json.loads(event.removeprefix(b"data: ")) for event in events)


def test_a_response_of_known_length_keeps_it_for_an_http_1_0_client(running: Running) -> None:
    with connect(running) as connection:
        connection.sendall(b"GET /v2 HTTP/1.0\r\nHost: localhost\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower() and json.loads(body)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", [STREAM, WHOLE])
def test_a_client_that_closes_its_sending_half_gets_its_answer(running: Running, version: str, path: str) -> None:
    with connect(running) as connection:
        connection.sendall(post(path, "n=1 sleep=300", version))
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
    interim, found, answer = received.rpartition(b"HTTP/1.1 200")
    assert found and interim in (b"", b"HTTP/1.1 100 Continue\r\n\r\n") and (version == "1.1" or not interim)
    assert b"text_output" in answer


@pytest.mark.parametrize("path", [STREAM, WHOLE])
def test_a_client_that_closes_its_connection_is_gone(running: Running, path: str) -> None:
    with connect(running) as connection:
        connection.sendall(post(path, "n=1 sleep=20000"))
        eventually(lambda: running.gate.open_inferences == 1)
    eventually(lambda: running.gate.open_inferences == 0)


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models//"])
def test_a_slash_behind_a_path(running: Running, path: str) -> None:
    assert httpx.get(f"http://{running.http}{path}").json() == httpx.get(f"http://{running.http}/v1/models").json()
    answer = httpx.post(f"http://{running.http}/v1/chat/completions/", json={})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
