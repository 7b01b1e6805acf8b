"""How long a client of an idle server waits for its first token, compared with the engine alone and with servers that
only write.

    python -m benchmarks.first_token --model CHECKPOINT --prompt-tokens 32

For what the host adds to the engine's own first token. Independent of loads; one client sends one request at a time.
Invariants: server, engine and bare servers are measured in turns; each prompt is new, so that no prefix is cached; the
clock runs from the request's first byte until the first event or message was read, on an open connection.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from . import stream_clients as clients
from .stream_servers import MOCK, Server, start_bare, start_tree, write_model

OUTPUT_TOKENS = 4
NAME = "bench"
ROUND = 20
"""Requests of one way before the next one has its turn."""
Measure = Callable[[list[int]], float]
"""Runs one request with this prompt; seconds until the first token."""


@dataclass
class Way:
    """One way to the engine, and what was measured on it."""

    name: str
    measure: Measure
    seconds: list[float] = field(default_factory=list)

    def line(self, engine: Way) -> str:
        """With both figures' distance from the engine's."""
        least, median = (
            f"{of(self.seconds) * 1e3:.2f} ms ({(of(self.seconds) - of(engine.seconds)) * 1e3:+.2f})"
            for of in (min, statistics.median)
        )
        return f"{self.name}: least {least}, median {median}"


class HttpClient:
    """A keep-alive connection that waits for the first event of each answer."""

    def __init__(self, address: str, request: Callable[[list[int]], bytes]) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request

    def __call__(self, prompt: list[int]) -> float:
        data, first_s, request = b"", 0.0, self._request(prompt)
        start_s = time.perf_counter()
        self._socket.sendall(request)
        while not data.endswith(b"0\r\n\r\n"):
            received = self._socket.recv(65536)
            if not received or (not data and not received.startswith(b"HTTP/1.1 200")):
                raise RuntimeError(f"refused: {received[:300]!r}")
            data += received
            if not first_s and b"data: {" in data:
                first_s = time.perf_counter() - start_s
        return first_s


class GrpcClient:
    """A channel; each request is a call of ModelStreamInfer."""

    def __init__(self, address: str) -> None:
        channel = grpc.insecure_channel(address)
        self._method: Any = channel.stream_stream(clients.STREAM_INFER)

    def __call__(self, prompt: list[int]) -> float:
        request = clients.grpc_request(NAME, OUTPUT_TOKENS, prompt, ignore_eos=True)
        start_s = time.perf_counter()
        messages: Iterator[bytes] = self._method(iter((request,)))
        next(messages)
        first_s = time.perf_counter() - start_s
        for _ in messages:
            pass
        return first_s


def generate_stream(prompt: list[int]) -> bytes:
    return clients.http_request(
        "generate_stream", NAME, OUTPUT_TOKENS, text_input=None, input_ids=prompt, ignore_eos=True
    )


def completions(prompt: list[int]) -> bytes:
    return clients.http_request("completions", NAME, OUTPUT_TOKENS, prompt=prompt, ignore_eos=True)


def chat(prompt: list[int]) -> bytes:
    """The same number of words, and the template's tokens beside them."""
    messages = [{"role": "user", "content": " ".join(str(token % 10) for token in prompt)}]
    return clients.http_request("chat", NAME, OUTPUT_TOKENS, messages=messages, ignore_eos=True)


def engine_alone(stack: ExitStack, arguments: dict[str, Any]) -> tuple[Measure, int]:
    """The engine on this process's thread, and the size of its vocabulary."""
    from llmbackend.engine.config import EngineConfig
    from llmbackend.engine.messages import InferRequest, SamplingParams
    from llmbackend.engine.offline import OfflineEngine

    engine = stack.enter_context(OfflineEngine(EngineConfig(**arguments)))
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

    def measure(prompt: list[int]) -> float:
        first_s, start_s = 0.0, time.perf_counter()
        for result in engine.generate(
            [InferRequest(request_id="1", prompt_token_ids=tuple(prompt), sampling=sampling)]
        ):
            if not first_s and result.outputs:
                first_s = time.perf_counter() - start_s
        return first_s

    return measure, engine.info.vocab_size


def server_ways(server: Server) -> list[Way]:
    return [
        Way("generate_stream", HttpClient(server.http, generate_stream)),
        Way("completions", HttpClient(server.http, completions)),
        Way("chat (its template's tokens more)", HttpClient(server.http, chat)),
        Way("gRPC", GrpcClient(server.grpc)),
    ]


def bare_ways(stack: ExitStack) -> list[Way]:
    flags = ("--streams", "1", "--tokens", "1", "--step-ms", "0")
    http, rpc = start_bare("http", *flags), start_bare("grpc", *flags)
    stack.callback(http.stop)
    stack.callback(rpc.stop)
    return [Way("bare SSE", HttpClient(http.http, generate_stream)), Way("bare grpc.aio", GrpcClient(rpc.grpc))]


def measure_in_turns(ways: Sequence[Way], count: int, prompt_tokens: int, vocab_size: int) -> None:
    draw = random.Random(0)
    for round_number in range(count // ROUND + 1):
        for way in ways:
            for _ in range(ROUND):
                seconds = way.measure([draw.randrange(3, vocab_size) for _ in range(prompt_tokens)])
                way.seconds += [seconds] if round_number else []  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MOCK, help="a checkpoint; the default has no weights and no step time")
    parser.add_argument("--tree", type=Path, default=Path("."), help="source tree of the server")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: more engine arguments")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=200, help="per way")
    arguments = parser.parse_args()
    engine_arguments = {"model": arguments.model, **arguments.options}
    with ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(repository, NAME, engine_arguments)
        server = start_tree(arguments.tree, repository)
        stack.callback(server.stop)
        alone, vocab_size = engine_alone(stack, engine_arguments)
        engine = Way("engine alone", alone)
        ways = [engine, *server_ways(server), *bare_ways(stack)]
        measure_in_turns(ways, arguments.requests, arguments.prompt_tokens, vocab_size)
        for way in ways:
            print(way.line(engine), flush=True)


if __name__ == "__main__":
    main()
