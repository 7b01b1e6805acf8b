"""CPU time of the server process per streamed token: 64 SSE streams of the mock model, in one or several source trees.

For: the cost of a change of frontends, host or adapter, as a ratio of two trees in one run (`git worktree add
/tmp/before REV`, then `python benchmarks/host_cpu_per_token.py /tmp/before .`). The engine is a process of its own and
not counted. Rounds of the trees alternate; on a noisy machine compare the smallest value of each tree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

NUM_STREAMS = 64
STEP_MS = 20
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v2/models/mock/generate_stream": {"text_input": "prompt", "stream": True},
    "/v1/completions": {"model": "mock", "prompt": "prompt", "stream": True},
    "/v1/chat/completions": {"model": "mock", "messages": [{"role": "user", "content": "prompt"}], "stream": True},
    "/v1/responses": {"model": "mock", "input": "prompt", "store": False, "stream": True},
}
MAX_TOKENS = {"/v1/responses": "max_output_tokens"}
"""The field that limits an answer, where it is not `max_tokens`."""


def start(tree: Path, repository: Path) -> tuple[subprocess.Popen[str], str, int]:
    """Starts a server of that tree on free ports; returns its process and its HTTP address."""
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "--model-repository", str(repository)]
    for protocol in ("http", "grpc", "metrics"):
        command += [f"--{protocol}-address", "127.0.0.1", f"--{protocol}-port", "0"]
    env = os.environ | {"NO_COLOR": "1", "PYTHONPATH": str(tree.resolve())}
    process = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"http\s+http://(\S+):(\d+)", line):
            return process, match[1], int(match[2])
    raise RuntimeError(f"the server of {tree} ended with exit code {process.wait()}")


async def stream(host: str, port: int, path: str, body: dict[str, Any]) -> int:
    """Runs one stream to its end; returns the number of its events, 0 where it was refused."""
    reader, writer = await asyncio.open_connection(host, port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    events = 0
    while data := await reader.read(65536):
        events += data.count(b"data: {")
        if data.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return events


async def run_streams(host: str, port: int, path: str, num_tokens: int) -> int:
    body = ENDPOINTS[path] | {MAX_TOKENS.get(path, "max_tokens"): num_tokens, "ignore_eos": True}
    return sum(await asyncio.gather(*(stream(host, port, path, body | {"seed": i}) for i in range(NUM_STREAMS))))


def measure(process: subprocess.Popen[str], host: str, port: int, path: str, num_tokens: int) -> float | None:
    """µs of the server process per token; None where it does not have the endpoint."""
    server = psutil.Process(process.pid)
    before = server.cpu_times()
    events = asyncio.run(run_streams(host, port, path, num_tokens))
    after = server.cpu_times()
    if not events:
        return None
    return float(after.user + after.system - before.user - before.system) / (NUM_STREAMS * num_tokens) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(".")], help="source trees, the first is the base")
    parser.add_argument("--tokens", type=int, default=200, help="per stream")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        repository = Path(directory)
        (repository / "mock" / "1").mkdir(parents=True)
        (repository / "mock" / "config.pbtxt").write_text('backend: "llm"\n')
        model = {"model": "mock", "mock_step_ms": STEP_MS, "max_num_seqs": NUM_STREAMS}
        (repository / "mock" / "1" / "model.json").write_text(json.dumps(model))
        servers = [start(tree, repository) for tree in arguments.trees]
        try:
            report(arguments.trees, servers, arguments.tokens, arguments.rounds)
        finally:
            for process, _, _ in servers:
                process.send_signal(signal.SIGTERM)
                process.wait()


def report(trees: list[Path], servers: list[Any], num_tokens: int, rounds: int) -> None:
    for path in ENDPOINTS:
        figures: list[list[float]] = [[] for _ in trees]
        for _ in range(rounds + 1):
            for of_tree, (process, host, port) in zip(figures, servers, strict=True):
                found = measure(process, host, port, path, num_tokens)
                of_tree += [] if found is None else [found]
        least = [min(of_tree[1:], default=0.0) for of_tree in figures]  # the first round warms up
        base = next((one for one in least if one), 0.0)
        for tree, of_tree, best in zip(trees, figures, least, strict=True):
            if not of_tree:
                print(f"{path} {tree}: has no such endpoint")
                continue
            median = statistics.median(of_tree[1:])
            print(f"{path} {tree}: least {best:.1f} µs, median {median:.1f} µs, {best / base:.2f} of the first")


if __name__ == "__main__":
    main()
