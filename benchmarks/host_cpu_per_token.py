"""CPU time of the server process per streamed token: 64 streams of the mock model, in one or several source trees.

    git worktree add /tmp/before REV
    python -m benchmarks.host_cpu_per_token /tmp/before . --endpoints chat,grpc
    python -m benchmarks.host_cpu_per_token --frontend-processes 1,2,4

For the cost of a change of frontends, host or adapter, as a ratio of two trees in one run, and its distance from the
lower bounds (servers that only write the same bytes). The engine and the clients are separate processes that are not
counted. Invariants: rounds of the trees alternate; the minimum is the cost of the code, the median shows how disturbed
the machine was.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from . import stream_clients as clients
from .stream_servers import MOCK, CpuTime, Server, start_bare, start_tree, write_mock

GRPC, GRPC_SHARED = "grpc", "grpc-shared"
"""One connection per client; one for all."""
ENDPOINTS = (*clients.HTTP_PATHS, GRPC, GRPC_SHARED)
MIN_MESSAGES = 0.9
"""Per token. Tokens within a character, or of nothing that is shown, send none."""
FLOORS = {"bare SSE": "generate_stream", "bare grpc.aio": GRPC, "bare grpc.aio, shared connection": GRPC_SHARED}


@dataclass(frozen=True)
class Load:
    """So many streams at once, each of so many tokens."""

    num_streams: int
    num_tokens: int
    step_ms: float

    def run(self, runner: asyncio.Runner, server: Server, endpoint: str) -> CpuTime | None:
        """The server's CPU time per token; None where it refused. Raises RuntimeError where messages are missing."""
        before = server.cpu()
        streamed = runner.run(self._streams(server, endpoint))
        spent = server.cpu() - before
        if not all(one.events for one in streamed):
            return None
        tokens = self.num_streams * self.num_tokens
        if (events := sum(one.events for one in streamed)) < MIN_MESSAGES * tokens:
            raise RuntimeError(f"{endpoint}: {events} messages for {tokens} tokens")
        return CpuTime(
            spent.total_s / tokens, spent.first_thread_s / tokens, spent.user_s / tokens, spent.system_s / tokens
        )

    def bare_server(self, protocol: str) -> Server:
        flags = {"--streams": self.num_streams, "--tokens": self.num_tokens, "--step-ms": self.step_ms}
        return start_bare(protocol, *(str(word) for flag in flags.items() for word in flag))

    async def _streams(self, server: Server, endpoint: str) -> Sequence[clients.Streamed]:
        if endpoint in clients.HTTP_PATHS:
            return await self._http_streams(server.http, endpoint)
        return await self._grpc_streams(server.grpc, 1 if endpoint == GRPC_SHARED else self.num_streams)

    async def _http_streams(self, address: str, endpoint: str) -> Sequence[clients.Streamed]:
        requests = [
            clients.http_request(endpoint, MOCK, self.num_tokens, ignore_eos=True, seed=index)
            for index in range(self.num_streams)
        ]
        return await clients.at_once(self.num_streams, lambda i: clients.http_stream(address, requests[i]))

    async def _grpc_streams(self, address: str, num_channels: int) -> Sequence[clients.Streamed]:
        messages = [
            clients.grpc_request(MOCK, self.num_tokens, ignore_eos=True, seed=index)
            for index in range(self.num_streams)
        ]
        channels = [clients.grpc_channel(address, index) for index in range(num_channels)]
        streamed = await clients.at_once(
            self.num_streams, lambda i: clients.grpc_stream(channels[i % num_channels], messages[i])
        )
        for channel in channels:
            await channel.close()
        return streamed


@dataclass(frozen=True)
class Target:
    """A server to measure, and how its lines are called."""

    name: str
    server: Server


def measure_turns(
    runner: asyncio.Runner, load: Load, targets: Sequence[Target], endpoint: str, rounds: int
) -> list[list[CpuTime]]:
    """Per target, the CPU time per token of each round; a round before them warms up. Empty where it was refused."""
    found: list[list[CpuTime]] = [[] for _ in targets]
    for round_number in range(rounds + 1):
        for of_target, target in zip(found, targets, strict=True):
            spent = load.run(runner, target.server, endpoint)
            of_target += [] if spent is None or round_number == 0 else [spent]
    return found


def show(title: str, targets: Sequence[Target], figures: Sequence[Sequence[CpuTime]]) -> None:
    base = next((min(one.total_s for one in of_target) for of_target in figures if of_target), 0.0)
    for target, of_target in zip(targets, figures, strict=True):
        if not of_target:
            print(f"{title} {target.name}: has no such endpoint")
            continue
        least = min(of_target, key=lambda spent: spent.total_s)
        median = statistics.median(spent.total_s for spent in of_target)
        system = statistics.fmean(of.system_s / ((of.user_s + of.system_s) or 1) for of in of_target)
        print(
            f"{title} {target.name}: least {least.total_s * 1e6:.1f} µs (system {system * least.total_s * 1e6:.1f}, "
            f"event loop's thread {least.first_thread_s * 1e6:.1f}), median {median * 1e6:.1f} µs, "
            f"{least.total_s / base:.2f} of the first",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(".")], help="source trees, the first is the base")
    parser.add_argument("--endpoints", default=",".join(ENDPOINTS), help="default: %(default)s")
    parser.add_argument(
        "--frontend-processes", default="1", help="numbers of them, each a server; default: %(default)s"
    )
    parser.add_argument("--no-floors", action="store_true", help="without the bare servers")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="per stream")
    parser.add_argument("--step-ms", type=float, default=20, help="of the engine")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    endpoints = arguments.endpoints.split(",")
    if unknown := set(endpoints) - set(ENDPOINTS):
        parser.error(f"--endpoints: no {', '.join(sorted(unknown))}; there are {', '.join(ENDPOINTS)}")
    load = Load(arguments.streams, arguments.tokens, arguments.step_ms)
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_mock(repository, {"mock_step_ms": arguments.step_ms, "max_num_seqs": arguments.streams})
        targets = []
        for tree, frontends in product(arguments.trees, map(int, arguments.frontend_processes.split(","))):
            name = str(tree) if frontends == 1 else f"{tree}, {frontends} frontend processes"
            targets.append(Target(name, start_tree(tree, repository, frontends)))
            stack.callback(targets[-1].server.stop)
        turn = partial(measure_turns, runner, load, rounds=arguments.rounds)
        for endpoint in endpoints:
            show(endpoint, targets, turn(targets=targets, endpoint=endpoint))
        for name, endpoint in FLOORS.items():
            if endpoint in endpoints and not arguments.no_floors:
                targets = [Target(name, load.bare_server("http" if endpoint in clients.HTTP_PATHS else "grpc"))]
                stack.callback(targets[0].server.stop)
                show("floor:", targets, turn(targets=targets, endpoint=endpoint))


if __name__ == "__main__":
    main()
