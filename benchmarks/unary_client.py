"""Load of a unary model over HTTP: raw connections, each of which sends the next request when it has its response.

Used by benchmarks/host.py. Independent of servers and models beyond the tensor that it sends.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time

ELEMENTS = 16
_LENGTH = b"content-length:"


async def http_latencies_s(address: str, model: str, connections: int, duration_s: float) -> list[float]:
    """One for each request, sorted. The model gets INPUT0 (FP32, [16]) and returns OUTPUT0, both as raw tensors. Raises
    RuntimeError for a response other than 200, and when the server closes a connection."""
    host, port = address.rsplit(":", 1)
    loop = asyncio.get_running_loop()
    request, end_s, latencies_s = _request(model), time.perf_counter() + duration_s, list[float]()
    clients = [_Client(request, end_s, latencies_s, loop.create_future()) for _ in range(connections)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, host, int(port))  # type: ignore[misc]
    await asyncio.gather(*(client.done for client in clients))
    return sorted(latencies_s)


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes, end_s: float, latencies_s: list[float], done: asyncio.Future[None]) -> None:
        self.done = done
        self._request = request
        self._end_s = end_s
        self._latencies_s = latencies_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < _content_length(head):
            return
        now_s = time.perf_counter()
        self._latencies_s.append(now_s - self._sent_s)
        if not head.startswith(b"HTTP/1.1 200 "):
            self._fail(f"the server answered {self._received!r}")
        elif now_s < self._end_s:
            self._received = b""
            self._send()
        else:
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.done.done():
            self._fail("the server closed a connection")

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def _fail(self, text: str) -> None:
        self.done.set_exception(RuntimeError(text))
        self._transport.close()


def _content_length(head: bytes) -> int:
    return int(head.lower().partition(_LENGTH)[2].partition(b"\r\n")[0])


def _request(model: str) -> bytes:
    tensor = {"name": "INPUT0", "shape": [ELEMENTS], "datatype": "FP32"}
    data = struct.pack(f"<{ELEMENTS}f", *range(ELEMENTS))
    inputs = [{**tensor, "parameters": {"binary_data_size": len(data)}}]
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(data)}",
        "\r\n",
    )
    return "\r\n".join(lines).encode() + head + data
