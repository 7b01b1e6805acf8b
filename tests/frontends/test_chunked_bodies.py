"""Bodies in chunks: joined whatever their sizes, bounded in number, and cheap for the event loop."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import pytest

from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.http.direct_body import MAX_CHUNKS, TOO_MANY_CHUNKS, BodyPieces
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import mock_llm_host

HEAD = b"POST /v2/logging HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
SHORT = b'{"log_verbose_level": 0}'


def in_chunks(body: bytes, sizes: Iterator[int]) -> bytes:
    pieces = []
    while body:
        piece, body = body[: (size := next(sizes))], body[size:]
        pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))
    return b"".join(pieces) + b"0\r\n\r\n"


def of_chunks(number: int) -> bytes:
    """A body of so many chunks of one byte."""
    padded = SHORT + b" " * (number - len(SHORT))
    return b"".join(b"1\r\n%c\r\n" % byte for byte in padded) + b"0\r\n\r\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from started(tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from started(tmp_path_factory.mktemp("keyed"), access=AccessControl(AccessSettings(api_keys=("secret",))))


def started(root: Path, **options: Any) -> Iterator[Running]:
    with Running(root, start=mock_llm_host, **options) as running:
        yield running


def connect(running: Running) -> socket.socket:
    host, port = running.http.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answers(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of `count` responses."""
    found = []
    with connection.makefile("rb") as stream:
        for _ in range(count):
            status = int(stream.readline().split()[1])
            headers = {}
            while line := stream.readline().strip():
                name, _, value = line.partition(b":")
                headers[name.lower()] = value.strip()
            found.append((status, stream.read(int(headers[b"content-length"]))))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_bodies_are_joined_whatever_the_sizes_of_chunks_and_packets(running: Running, seed: int) -> None:
    """Pipelined, so that a packet holds the end of one body and the beginning of another request."""
    dice = random.Random(seed)
    bodies = [json.dumps({"log_verbose_level": level}).encode() + b" " * dice.randrange(3000) for level in range(4)]
    sizes = iter(lambda: dice.choice((1, 2, 17, 900)), 0)
    sent = b"".join(HEAD + in_chunks(body, sizes) for body in bodies)
    with connect(running) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sent:
            size = dice.choice((1, 100, 5000))
            connection.sendall(sent[:size])
            sent = sent[size:]
        found = answers(connection, 4)
    assert [(status, json.loads(body)["log_verbose_level"]) for status, body in found] == [(200, n) for n in range(4)]


@pytest.mark.parametrize(("number", "status"), [(MAX_CHUNKS, 200), (MAX_CHUNKS + 1, 400)])
def test_a_body_has_a_bound_of_chunks(running: Running, number: int, status: int) -> None:
    with connect(running) as connection:
        connection.sendall(HEAD + of_chunks(number))
        ((answered, body),) = answers(connection, 1)
    assert answered == status
    if status == 400:
        assert json.loads(body) == {"error": TOO_MANY_CHUNKS}
    assert TOO_MANY_CHUNKS.startswith("Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer")


def test_the_bound_holds_for_each_body_of_a_connection(running: Running) -> None:
    with connect(running) as connection:
        connection.sendall((HEAD + of_chunks(MAX_CHUNKS // 2)) * 3)
        assert [status for status, _ in answers(connection, 3)] == [200] * 3


def test_without_a_key_the_answer_comes_before_the_body(keyed: Running) -> None:
    with connect(keyed) as connection:
        connection.sendall(HEAD + b"1\r\n{\r\n")
        ((status, _),) = answers(connection, 1)
        assert status == 401
        connection.sendall(b"1\r\n \r\n" * 20_000)  # more than one read: the rest of it is not parsed
        connection.sendall(b"this is no chunk")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000) == b""


def test_a_chunk_runs_no_bytecode_of_ours() -> None:
    """What keeps one byte per chunk cheap: both callbacks are built-in, and the protocol is told of no piece."""

    class Protocol:
        def on_message_begin(self) -> None: ...

        def on_url(self, url: bytes) -> None: ...

        def on_header(self, name: bytes, value: bytes) -> None: ...

        def on_headers_complete(self) -> None: ...

        def on_message_complete(self) -> None: ...

        def on_body(self, body: bytes) -> None:
            raise AssertionError("a piece came alone")

    pieces = BodyPieces()
    parser: httptools.HttpRequestParser = pieces.parser(Protocol())
    pieces.begin()
    parser.feed_data(HEAD + b"1\r\na\r\n" * 1000)
    assert (pieces.num_chunks, pieces.take(), pieces.num_chunks) == (1000, b"a" * 1000, 1000)
    assert pieces.is_dense
    parser.feed_data(b"3\r\nbcd\r\n0\r\n\r\n")
    assert (pieces.num_chunks, pieces.take()) == (1002, b"bcd")
    pieces.begin()
    assert pieces.num_chunks == 0
