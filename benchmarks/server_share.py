"""How much of the engine's speed reaches 32 streaming clients, and who uses the CPU meanwhile.

    python -m benchmarks.server_share --model CHECKPOINT --options '{"quantization": "int8"}'

For: the share of a server beside its engine on the same cores. Does not know: other servers (servers.py compares them).
Invariants: the same requests go to the engine alone, with as many rows as there are clients, and to the server, in
turns; clients read raw sockets in one thread and parse nothing; every token is generated or the run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from . import stream_clients as clients
from .stream_servers import Server, cpu_of, start_tree, write_model

NAME = "bench"
MIN_EVENTS = 0.9
"""Per token; a token within a character sends none."""


@dataclass(frozen=True)
class Run:
    """One run of all requests: its speed, and cores in use by process."""

    tokens_per_s: float
    cores: dict[str, float]

    def line(self) -> str:
        shares = ", ".join(f"{name} {cores:.2f}" for name, cores in self.cores.items())
        return f"{self.tokens_per_s:.0f} tokens/s; cores: {shares}"


class Client:
    """A connection of its own, which sends one request after the other from a list that it shares."""

    def __init__(self, address: str, waiting: list[bytes]) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)))
        self.events = 0
        self._waiting = waiting
        self._tail = b""

    def send_next(self) -> bool:
        """Whether there was another request."""
        if self._waiting:
            self._tail = b""
            self.socket.sendall(self._waiting.pop())
            return True
        return False

    def read(self) -> bool:
        """Whether the answer goes on."""
        data = self.socket.recv(65536)
        if not data or (not self._tail and not data.startswith(b"HTTP/1.1 200")):
            raise RuntimeError(f"refused: {data[:300]!r}")
        self.events += data.count(b"data: {")
        self._tail = (self._tail + data)[-5:]
        return self._tail != b"0\r\n\r\n"


def run_clients(address: str, requests: Sequence[bytes], count: int) -> int:
    """Events of all answers."""
    waiting = list(requests)
    all_clients = [Client(address, waiting) for _ in range(count)]
    with selectors.DefaultSelector() as selector:
        for client in all_clients:
            client.send_next()
            selector.register(client.socket, selectors.EVENT_READ, client)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read() and not key.data.send_next():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    return sum(client.events for client in all_clients)


@dataclass(frozen=True)
class Work:
    prompts: list[list[int]]
    output_tokens: int
    num_clients: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompts) * self.output_tokens

    def through(self, server: Server, endpoint: str) -> Run:
        """Raises RuntimeError when tokens are missing."""
        field = "input_ids" if endpoint == "generate_stream" else "prompt"
        fields = {field: None, "ignore_eos": True, "temperature": 0.0} | (
            {"text_input": None} if endpoint == "generate_stream" else {}
        )
        requests = [
            clients.http_request(endpoint, NAME, self.output_tokens, **(fields | {field: prompt}))
            for prompt in self.prompts
        ]
        children = psutil.Process(server.process.pid).children(recursive=True)
        pids = {"host": [server.process.pid], "engine": [child.pid for child in children], "clients": [os.getpid()]}
        before, start_s = _cpu(pids), time.perf_counter()
        events = run_clients(server.http, requests, self.num_clients)
        wall_s, after = time.perf_counter() - start_s, _cpu(pids)
        if events < MIN_EVENTS * self.num_tokens:
            raise RuntimeError(f"{endpoint}: {events} events for {self.num_tokens} tokens")
        return Run(self.num_tokens / wall_s, {name: (after[name] - before[name]) / wall_s for name in pids})

    def on(self, engine: Any) -> Run:
        from llmbackend.engine.messages import InferRequest, SamplingParams

        sampling = SamplingParams(max_tokens=self.output_tokens, temperature=0.0, ignore_eos=True)
        requests = [
            InferRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling)
            for index, prompt in enumerate(self.prompts)
        ]
        before, start_s = time.process_time(), time.perf_counter()
        tokens = sum(len(output.token_ids) for result in engine.generate(requests) for output in result.outputs)
        wall_s, after = time.perf_counter() - start_s, time.process_time()
        if tokens != self.num_tokens:
            raise RuntimeError(f"engine alone: {tokens} of {self.num_tokens} tokens")
        return Run(tokens / wall_s, {"engine": (after - before) / wall_s})


def _cpu(pids: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(cpu_of(pid).total_s for pid in of_name) for name, of_name in pids.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint")
    parser.add_argument("--tree", type=Path, default=Path("."), help="source tree of the server")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: more engine arguments")
    parser.add_argument("--endpoint", choices=("completions", "generate_stream"), default="completions")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from llmbackend.engine.config import EngineConfig
    from llmbackend.engine.offline import OfflineEngine

    engine_arguments = {"model": arguments.model, "max_num_seqs": arguments.clients, **arguments.options}
    draw = random.Random(0)
    with ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(repository, NAME, engine_arguments)
        server = start_tree(arguments.tree, repository)
        stack.callback(server.stop)
        engine = stack.enter_context(OfflineEngine(EngineConfig(**engine_arguments)))
        ratios = []
        for round_number in range(arguments.rounds + 1):
            prompts = [
                [draw.randrange(3, engine.info.vocab_size) for _ in range(arguments.prompt_tokens)]
                for _ in range(arguments.requests)
            ]
            work = Work(prompts, arguments.output_tokens, arguments.clients)
            alone, through = work.on(engine), work.through(server, arguments.endpoint)
            if not round_number:  # warms up
                continue
            ratios.append(through.tokens_per_s / alone.tokens_per_s)
            print(f"engine alone: {alone.line()}\nserver: {through.line()}; {ratios[-1]:.1%} of the engine", flush=True)
        print(f"median {statistics.median(ratios):.1%}, from {min(ratios):.1%} to {max(ratios):.1%}")


if __name__ == "__main__":
    main()
