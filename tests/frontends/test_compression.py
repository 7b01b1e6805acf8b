"""Compressed bodies over real HTTP, and compressed inference responses over gRPC."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.frontends.protocol_options import CompressionLevel, ProtocolOptions
from tests.helpers.kserve_runner import Running

ROWS = 8
BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [ROWS, 4], "data": [1.0] * 4 * ROWS}]}
).encode()


HOST_OPTIONS = {"max_input_size_bytes": 1 << 16}


def infer(http: httpx.Client, body: bytes = BODY, **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post("/v2/models/identity/infer", content=body, headers=sent)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_request_is_unpacked(http: httpx.Client, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    response = infer(http, pack(BODY), content_encoding=encoding)
    assert response.status_code == 200 and response.json()["outputs"][0]["data"] == [1.0] * 4 * ROWS
    cut = infer(http, pack(BODY)[:-6], content_encoding=encoding)
    assert cut.status_code == 400 and "incomplete" in cut.json()["error"]


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("identity", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("identity;q=0.9, gzip;q=0.5", None),
        ("identity;q=0.5, gzip;q=0.9", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=x, deflate", "deflate"),
        ("br, *", None),
        (";q=1, , gzip", "gzip"),
    ],
)
def test_the_response_has_the_encoding_with_the_highest_quality(
    http: httpx.Client, accepted: str, chosen: str | None
) -> None:
    response = infer(http, accept_encoding=accepted)
    assert response.headers.get("content-encoding") == chosen
    assert response.json()["outputs"][0]["data"] == [1.0] * 4 * ROWS


def test_a_bomb_is_refused_at_the_size_limit(http: httpx.Client) -> None:
    response = infer(http, gzip.compress(bytes(1 << 24)), content_encoding="gzip")
    assert response.status_code == 400 and "Decompressed data size exceeds the maximum" in response.json()["error"]


def test_an_unknown_encoding_is_refused_with_those_that_are_known(http: httpx.Client) -> None:
    response = infer(http, content_encoding="br")
    assert (response.status_code, response.json()) == (501, {"error": "Unsupported compression type"})
    assert response.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_generate_takes_no_compressed_request(http: httpx.Client, path: str) -> None:
    response = http.post(
        f"/v2/models/llm/{path}", content=gzip.compress(b'{"text_input":"n=1"}'), headers={"content-encoding": "gzip"}
    )
    assert response.status_code == 400
    assert response.json() == {"error": "Unsupported content-encoding, only 'identity' is supported."}


# --- gRPC -------------------------------------------------------------------------------------------------------------


class Relay:
    """Stands between one client and a server, and counts what the server sends."""

    def __init__(self, server: str) -> None:
        host, port = server.split(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = socket.create_connection((host, int(port)))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.from_server_bytes = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._client, _ = self._listener.accept()
        back = threading.Thread(target=self._pump, args=(self._server, self._client, True), daemon=True)
        back.start()
        self._threads.append(back)
        self._pump(self._client, self._server, False)

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    self.from_server_bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_exception: object) -> None:
        for thread in self._threads:
            thread.join(10)
        for each in (self._listener, self._server, self._client):
            each.close()


def answered_bytes(running: Running) -> tuple[int, bytes]:
    """How large an answer with 64 KiB of equal characters was on the wire, and the answer."""
    request = pb.ModelInferRequest(model_name="llm")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"n=1 kib=64")
    with Relay(running.grpc) as relay, grpc.insecure_channel(relay.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (answer,) = stub.ModelStreamInfer(iter([request]))
    return relay.from_server_bytes, answer.infer_response.raw_output_contents[0]


def test_grpc_responses_are_not_compressed_by_default(running: Running) -> None:
    on_the_wire, answer = answered_bytes(running)
    assert on_the_wire > len(answer) > 64 << 10


@pytest.mark.parametrize("level", ["low", "high"])
def test_grpc_responses_are_compressed_at_the_level_that_was_asked_for(tmp_path: Path, level: CompressionLevel) -> None:
    with Running(tmp_path, protocols=ProtocolOptions(grpc_response_compression=level)) as running:
        on_the_wire, answer = answered_bytes(running)
        assert len(answer) > 64 << 10 and on_the_wire < 8 << 10
        request = pb.ModelInferRequest(model_name="identity", raw_input_contents=[bytes(16)])
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
        with grpc.insecure_channel(running.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ModelInfer(request).raw_output_contents[0] == bytes(16)
