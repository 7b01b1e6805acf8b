"""A case: one action on a server, and the text of the response.

Used by the case files and the comparison. Independent of the server. Invariant: the text contains everything that a
client can see (status, meaningful headers, body, tensors with their bytes) and nothing that varies by itself (times,
ports, the order of a JSON object's keys).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from google.protobuf import text_format
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2, service_pb2_grpc

SEEN_HEADERS = ("content-type", "inference-header-content-length", "content-encoding")
TIMEOUT_S = 30.0


class Server:
    """One server's ways in."""

    def __init__(self, name: str, repository: Path, http: str, grpc_address: str, metrics: str) -> None:
        self.name = name
        self.repository = repository
        self.http_address, self.grpc_address = http, grpc_address
        self.http = httpx.Client(base_url=f"http://{http}", timeout=TIMEOUT_S, trust_env=False)
        self.metrics = httpx.Client(base_url=f"http://{metrics}", timeout=TIMEOUT_S, trust_env=False)
        self._channel = grpc.insecure_channel(grpc_address, [("grpc.max_receive_message_length", 1 << 28)])
        self.grpc = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        self.http.close()
        self.metrics.close()
        self._channel.close()


@dataclass(frozen=True)
class Case:
    name: str
    send: Callable[[Server], str]


def http_case(
    name: str,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Case:
    """One HTTP exchange. A body of bytes goes out as it is, anything else as JSON."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()

    def send(server: Server) -> str:
        return shown_http(server.http.request(method, path, content=content, headers=headers))

    return Case(name, send)


def shown_http(answer: httpx.Response) -> str:
    lines = [f"{answer.status_code}"]
    lines += [f"{name}: {answer.headers[name]}" for name in SEEN_HEADERS if name in answer.headers]
    return "\n".join([*lines, *_shown_body(answer)])


def _shown_body(answer: httpx.Response) -> list[str]:
    content = answer.content
    length = answer.headers.get("inference-header-content-length")
    if length is not None:
        return [sorted_json(content[: int(length)].decode()), content[int(length) :].hex()]
    text = content.decode(errors="backslashreplace")
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = text.split("\n\n")
        return [f"data: {sorted_json(event.removeprefix('data: '))}" if event else "(end)" for event in events]
    return [sorted_json(text)]


def sorted_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def grpc_case(name: str, rpc: str, request: Message, metadata: tuple[tuple[str, str], ...] = ()) -> Case:
    """One unary call."""

    def send(server: Server) -> str:
        try:
            return shown_message(getattr(server.grpc, rpc)(request, timeout=TIMEOUT_S, metadata=metadata))
        except grpc.RpcError as error:
            return shown_error(error)

    return Case(name, send)


def stream_case(
    name: str, requests: list[service_pb2.ModelInferRequest], metadata: tuple[tuple[str, str], ...] = ()
) -> Case:
    """All requests on one stream, one after the other's last response, so that both servers see the same order."""

    def send(server: Server) -> str:
        return "\n---\n".join(_one_stream(server, request, metadata) for request in requests)

    return Case(name, send)


def _one_stream(server: Server, request: service_pb2.ModelInferRequest, metadata: tuple[tuple[str, str], ...]) -> str:
    lines = []
    try:
        for message in server.grpc.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S, metadata=metadata):
            lines.append(shown_message(message))
    except grpc.RpcError as error:
        lines.append(shown_error(error))
    return "\n".join(lines) or "(nothing)"


def shown_message(message: Message) -> str:
    return text_format.MessageToString(message, as_one_line=True) or "(empty)"


def shown_error(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
