"""What a server reaches of its engine alone: the same requests through `llmbackend bench` and streaming clients.

    python -m benchmarks.server_share --model CHECKPOINT --rounds 5 -- --quantization int8
    python -m benchmarks.server_share --model CHECKPOINT --trees /tmp/before .

For docs/benchmarks_host.md. The clients read raw server-sent events; they, the host and the engine share the machine's
cores. Options after `--` go to `bench` and `serve`. Invariants: rounds alternate, of source trees too; at most
`--streams` requests run at a time in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from .stream_clients import http_request, http_stream
from .stream_servers import CpuTime, Server, start_serve
from .workloads import Request, workload, write_workload


@dataclass(frozen=True)
class Round:
    """Seconds for all requests, and CPU seconds of the host's process in the meantime."""

    alone_s: float
    served_s: float
    host_cpu_s: float


def measure(tree: Path, model: str, options: Sequence[str], requests: Sequence[Request], streams: int) -> Round:
    options = [*options, "--max-num-seqs", str(streams)]
    alone_s = _alone_s(tree, model, options, list(requests))
    server = start_serve(tree, model, options)
    try:
        name = json.load(urlopen(f"http://{server.http}/v1/models"))["data"][0]["id"]
        asyncio.run(_clients(server, name, requests[:streams], streams, most_tokens=4))
        before, start_s = server.cpu(), time.perf_counter()
        asyncio.run(_clients(server, name, requests, streams))
        spent: CpuTime = server.cpu() - before
        return Round(alone_s, time.perf_counter() - start_s, spent.total_s)
    finally:
        server.stop()


def _alone_s(tree: Path, model: str, options: Sequence[str], requests: list[Request]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        items, result = Path(directory) / "items.json", Path(directory) / "result.json"
        write_workload(requests, items)
        command = [sys.executable, "-m", "llmbackend.cli", "bench", "--model", model, "--workload", str(items)]
        subprocess.run([*command, "--json", str(result), *options], cwd=tree, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(result.read_text())["wall_s"])


async def _clients(
    server: Server, name: str, requests: Sequence[Request], streams: int, most_tokens: int = 1 << 20
) -> None:
    """So many clients, each with its next request when one ends. Raises RuntimeError if a stream is short."""
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            num_tokens = min(request.output_tokens, most_tokens)
            body = http_request("completions", name, num_tokens, prompt=request.prompt, ignore_eos=True, temperature=0)
            if (await http_stream(server.http, body)).events < 0.5 * num_tokens:
                raise RuntimeError(f"a stream of {num_tokens} tokens was short")

    await asyncio.gather(*(client() for _ in range(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("options", nargs="*")
    parser.add_argument("--trees", nargs="+", type=Path, default=[Path(".")], help="source trees")
    parser.add_argument("--workload", default="W1")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    requests = workload(arguments.workload)
    rounds: dict[Path, list[Round]] = {tree: [] for tree in arguments.trees}
    for _ in range(arguments.rounds):
        for tree, found in rounds.items():
            found.append(measure(tree, arguments.model, arguments.options, requests, arguments.streams))
            last = found[-1]
            print(
                f"{tree}: alone {last.alone_s:.2f} s, served {last.served_s:.2f} s, host {last.host_cpu_s:.2f} s",
                flush=True,
            )
    for tree, found in rounds.items():
        shares = [100 * one.alone_s / one.served_s for one in found]
        print(f"{tree}: {statistics.median(shares):.1f} % of the engine alone ({min(shares):.1f} to {max(shares):.1f})")


if __name__ == "__main__":
    main()
