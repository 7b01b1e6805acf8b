"""One request of an open-loop load: sent when it is due, independent of earlier ones.

Used by overload. Independent of how many there are. Invariant: the generator is cheap (raw sockets for HTTP), so that
the server is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from .clients.grpc_stream import GrpcClient
from .outcome import StreamFailed
from .specs import StreamSpec

REFUSALS = (
    "503",
    "429",
    "StatusCode.UNAVAILABLE",
    "UNAVAILABLE",
    "StatusCode.RESOURCE_EXHAUSTED",
    "RESOURCE_EXHAUSTED",
)


@dataclass(frozen=True)
class Answer:
    """code: "200", "OK", or as StreamFailed's. text: of the whole stream; the error when refused. first_s: until the
    status (HTTP) or the first message (gRPC). retry_after: whether a refusal had that header."""

    spec: StreamSpec
    code: str
    text: str
    first_s: float
    whole_s: float
    retry_after: bool = False

    @property
    def is_accepted(self) -> bool:
        return self.code in ("200", "OK")

    @property
    def is_refused(self) -> bool:
        return self.code in REFUSALS


async def offer_http(address: str, spec: StreamSpec) -> Answer:
    """generate_stream, or an OpenAI chat stream. Raises OSError when the server does not take the connection."""
    began_s = time.monotonic()
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        path, body = _request(spec)
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        header = await reader.readuntil(b"\r\n\r\n")
        first_s = time.monotonic() - began_s
        answer = await reader.read()
    finally:
        writer.close()
    code = header.split(b" ", 2)[1].decode()
    text = _text(spec, answer) if code == "200" else answer.decode(errors="replace")
    if text is None:
        code, text = "in band", answer.decode(errors="replace")
    return Answer(spec, code, text, first_s, time.monotonic() - began_s, b"\nretry-after:" in header.lower())


async def offer_grpc(client: GrpcClient, spec: StreamSpec) -> Answer:
    began_s = time.monotonic()
    first_s = 0.0
    texts = []
    try:
        async for piece in client.pieces(spec):
            first_s = first_s or time.monotonic() - began_s
            texts.append(piece.text)
    except StreamFailed as error:
        took_s = time.monotonic() - began_s
        return Answer(spec, error.code, str(error), took_s, took_s)
    return Answer(spec, "OK", "".join(texts), first_s, time.monotonic() - began_s)


def _request(spec: StreamSpec) -> tuple[str, dict[str, Any]]:
    if spec.protocol == "chat":
        messages = [{"role": "user", "content": spec.prompt}]
        return "/v1/chat/completions", {"model": spec.model, "messages": messages, "stream": True, **spec.sampling}
    body = {"text_input": spec.prompt, "stream": True, "sampling_parameters": spec.sampling_json}
    return f"/v2/models/{spec.model}/generate_stream", body


def _text(spec: StreamSpec, answer: bytes) -> str | None:
    """Of all events; None when one of them is an error. (A chunk of the transfer coding never cuts a line: each holds
    whole events.)"""
    texts = []
    for line in answer.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            return None
        texts.append(
            event["choices"][0]["delta"].get("content") or "" if spec.protocol == "chat" else event["text_output"]
        )
    return "".join(texts)
