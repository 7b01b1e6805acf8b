"""Cheap streaming clients: raw sockets for server-sent events, serialised messages for gRPC.

Used by the benchmarks of the host. Independent of servers and figures. Invariants: a request is made before the clock
runs; what arrives is counted and not parsed; each client has its own connection, unless told to share one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np
from tritonclient.grpc import InferInput, service_pb2

STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True)
class Streamed:
    """What one client got."""

    events: int
    """Events or messages; 0 where the request was refused."""
    first_s: float
    """From the moment before the request was written until the first event or message was read."""


@dataclass(frozen=True)
class HttpPath:
    """An endpoint of server-sent events: the fields of its body, and the name of the one that limits the answer."""

    path: str
    body: dict[str, Any]
    max_tokens: str = "max_tokens"


HTTP_PATHS: Final = {
    "generate_stream": HttpPath("/v2/models/{model}/generate_stream", {"text_input": "prompt", "stream": True}),
    "completions": HttpPath("/v1/completions", {"prompt": "prompt", "stream": True}),
    "chat": HttpPath("/v1/chat/completions", {"messages": [{"role": "user", "content": "prompt"}], "stream": True}),
    "responses": HttpPath("/v1/responses", {"input": "prompt", "store": False, "stream": True}, "max_output_tokens"),
}


def http_request(kind: str, model: str, num_tokens: int, **fields: Any) -> bytes:
    """A whole HTTP request for a stream of so many tokens, one of HTTP_PATHS; a field of None is left out."""
    of_kind = HTTP_PATHS[kind]
    body = {"model": model, **of_kind.body, of_kind.max_tokens: num_tokens, **fields}
    if kind == "generate_stream":
        body.pop("model")
    content = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    head = f"POST {of_kind.path.format(model=model)} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def http_stream(address: str, request: bytes) -> Streamed:
    """Sends `request` on a new connection, and reads to the end of its chunked answer."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    events, first_s, start_s = 0, 0.0, time.perf_counter()
    writer.write(request)
    while data := await reader.read(65536):
        events += data.count(b"data: {")
        if events and not first_s:
            first_s = time.perf_counter() - start_s
        if data.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return Streamed(events, first_s)


def grpc_request(model: str, num_tokens: int, prompt: Sequence[int] = (), **sampling: Any) -> bytes:
    """A serialised ModelInferRequest for a stream of so many tokens; `prompt`: as token ids."""
    request = service_pb2.ModelInferRequest(model_name=model, id="1")
    parameters = json.dumps({"max_tokens": num_tokens, **sampling}).encode()
    text = ("text_input", "BYTES", np.array([b"prompt"], object))
    for name, datatype, value in (
        ("input_ids", "INT32", np.array(prompt, np.int32)) if prompt else text,
        ("stream", "BOOL", np.array([True])),
        ("sampling_parameters", "BYTES", np.array([parameters], object)),
    ):
        tensor = InferInput(name, value.shape, datatype)
        tensor.set_data_from_numpy(value)
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    serialised: bytes = request.SerializeToString()
    return serialised


def grpc_channel(address: str, index: int = 0) -> grpc.aio.Channel:
    """A channel; those of different `index` have connections of their own."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), ("llmbackend.i", index)])


async def grpc_stream(channel: grpc.aio.Channel, request: bytes) -> Streamed:
    """One call of ModelStreamInfer with one request, read to its end. Messages are not parsed."""
    method: Any = channel.stream_stream(STREAM_INFER)
    messages, first_s, start_s = 0, 0.0, time.perf_counter()
    call = method(_only(request))
    while await call.read() is not grpc.aio.EOF:
        if not messages:
            first_s = time.perf_counter() - start_s
        messages += 1
    return Streamed(messages, first_s)


async def _only(request: bytes) -> AsyncIterator[bytes]:
    yield request


Stream = Callable[[int], Awaitable[Streamed]]
"""Runs the stream of a client by its number."""


async def at_once(count: int, stream: Stream) -> list[Streamed]:
    return await asyncio.gather(*(stream(index) for index in range(count)))
