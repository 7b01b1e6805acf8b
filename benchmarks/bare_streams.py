"""Servers that do nothing but write: the cost of a token without any host.

    python -m benchmarks.bare_streams http|grpc --streams 64 --tokens 200 --step-ms 20

For the lower bounds in host_cpu_per_token.py. Independent of models and requests; it answers whatever it is sent.
Invariants: when as many clients as `--streams` wait, each is sent one message per step, all at the same time, as from
an engine; messages have the bytes of the host's (a chunk of generate_stream, a ModelStreamInferResponse); the event
loop is the one that the server uses.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import uvloop
from tritonclient.grpc import service_pb2

EVENT: Final = b'data: {"model_name":"mock","model_version":"1","text_output":" t1234"}\n\n'
CHUNK: Final = f"{len(EVENT):x}\r\n".encode() + EVENT + b"\r\n"
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"


class Steps:
    """Wakes all clients at each step, once so many of them wait."""

    def __init__(self, num_streams: int, num_tokens: int, step_s: float) -> None:
        self.num_tokens = num_tokens
        self._num_streams = num_streams
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []

    async def next(self) -> None:
        """Waits for the next step."""
        loop = asyncio.get_running_loop()
        step: asyncio.Future[None] = loop.create_future()
        self._waiting.append(step)
        if len(self._waiting) == self._num_streams:
            loop.call_later(self._step_s, self._wake)
        await step

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            step.set_result(None)


class HttpWriter(asyncio.Protocol):
    """Writes straight into its transport, as cheap as Python's sockets get: no task, one write per event."""

    clients: Final[list[HttpWriter]] = []

    def __init__(self, steps: Steps, num_streams: int, step_s: float) -> None:
        self._steps, self._num_streams, self._step_s = steps, num_streams, step_s
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(HEAD)
        self.clients.append(self)
        if len(self.clients) == self._num_streams:
            asyncio.get_running_loop().call_later(self._step_s, self._step, self._steps.num_tokens)

    def _step(self, left: int) -> None:
        for client in self.clients:
            client._transport.write(CHUNK)
        if left > 1:
            asyncio.get_running_loop().call_later(self._step_s, self._step, left - 1)
            return
        for client in self.clients:
            client._transport.write(LAST_CHUNK)
        self.clients.clear()


def message() -> bytes:
    """A token as the host sends it over gRPC."""
    answer = service_pb2.ModelStreamInferResponse()
    response = answer.infer_response
    response.model_name, response.model_version, response.id = "mock", "1", "1"
    response.parameters["triton_final_response"].bool_param = False
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(b"\x06\0\0\0 t1234")
    serialised: bytes = answer.SerializeToString()
    return serialised


async def serve_http(arguments: argparse.Namespace, steps: Steps) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: HttpWriter(steps, arguments.streams, arguments.step_ms / 1e3), "127.0.0.1", 0
    )
    host, port = server.sockets[0].getsockname()
    print(f"http {host}:{port}", flush=True)
    await server.serve_forever()


async def serve_grpc(arguments: argparse.Namespace, steps: Steps) -> None:
    data = message()

    async def stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async for _ in requests:
            for _ in range(steps.num_tokens):
                await steps.next()
                await context.write(data)

    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(stream)
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": handler})
    server.add_generic_rpc_handlers((service,))
    print(f"grpc 127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("protocol", choices=("http", "grpc"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20)
    arguments = parser.parse_args()
    steps = Steps(arguments.streams, arguments.tokens, arguments.step_ms / 1e3)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run((serve_http if arguments.protocol == "http" else serve_grpc)(arguments, steps))


if __name__ == "__main__":
    main()
