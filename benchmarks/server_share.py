"""The speed of a server relative to its engine alone: the same requests by streaming clients and `llmbackend bench`.

    python -m benchmarks.server_share --model CHECKPOINT --rounds 5 -- --quantization int8
    python -m benchmarks.server_share --model CHECKPOINT --trees /tmp/before .

For docs/benchmarks_host.md. The clients read raw server-sent events; they, the host and the engine share the machine's
cores. Options after `--` go to `bench` and `serve`. Invariants: rounds alternate, of source trees too; at most
`--streams` requests run at a time in both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .drivers import llmbackend_bench
from .stream_clients import http_request, http_stream
from .stream_servers import Server, start_serve
from .workloads import Request, workload

NAME = "model"
WARM_UP_TOKENS = 4
"""Of each stream's answer."""


@dataclass(frozen=True)
class Round:
    """Seconds for all requests, and CPU seconds of the host's process in the meantime."""

    alone_s: float
    served_s: float
    host_cpu_s: float


def measure(tree: Path, model: str, options: Sequence[str], workload_name: str, streams: int) -> Round:
    options = [*options, "--max-num-seqs", str(streams)]
    alone_s = llmbackend_bench.run(model, workload_name, options, tree)["wall_s"]
    requests = workload(workload_name)
    server = start_serve(tree, model, NAME, options)
    try:
        asyncio.run(
            _clients(server, [replace(one, output_tokens=WARM_UP_TOKENS) for one in requests[:streams]], streams)
        )
        before, start_s = server.cpu(), time.perf_counter()
        asyncio.run(_clients(server, requests, streams))
        return Round(alone_s, time.perf_counter() - start_s, (server.cpu() - before).total_s)
    finally:
        server.stop()


async def _clients(server: Server, requests: Sequence[Request], streams: int) -> None:
    """So many clients, each with its next request when one ends. Raises RuntimeError if a stream is short."""
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            num_tokens = request.output_tokens
            body = http_request("completions", NAME, num_tokens, prompt=request.prompt, ignore_eos=True, temperature=0)
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
    rounds: dict[Path, list[Round]] = {tree: [] for tree in arguments.trees}
    for _ in range(arguments.rounds):
        for tree, found in rounds.items():
            found.append(measure(tree, arguments.model, arguments.options, arguments.workload, arguments.streams))
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
