"""What viewers of /v2/engine/events cost: speed and CPU time per token of 64 streams, without and with viewers.

    python -m benchmarks.feed_cost                     the bundled model
    python -m benchmarks.feed_cost --model CHECKPOINT --viewers 1,3,8

For: the effect of being watched. Does not know: what the events say. Invariants: the same requests go to one server in
turns, with each number of viewers; viewers read all they get and parse nothing; every token is generated or the run
fails.
"""

from __future__ import annotations

import argparse
import random
import selectors
import socket
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .server_share import NAME, Run, Work
from .stream_servers import ROOT, start_tree, write_model

PROMPT_TOKENS = 16
VOCABULARY = 256
"""Token ids of prompts are below; every checkpoint has more."""


@contextmanager
def viewers(address: str, count: int) -> Iterator[list[int]]:
    """So many viewers, who read on one thread; the sum of their bytes is the list's only element."""
    host, port = address.rsplit(":", 1)
    num_bytes = [0]
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        sockets = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for one in sockets:
            one.sendall(b"GET /v2/engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            one.recv(1)
            selector.register(one, selectors.EVENT_READ)
        reader = threading.Thread(target=_read, args=(selector, num_bytes))
        reader.start()
        yield num_bytes
        for one in sockets:
            one.shutdown(socket.SHUT_RDWR)
        reader.join()


def _read(selector: selectors.DefaultSelector, num_bytes: list[int]) -> None:
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]  # a socket
            num_bytes[0] += len(data)
            if not data:
                selector.unregister(key.fileobj)


def _least_cpu_us(runs: Sequence[Run], process: str) -> float:
    """CPU time per token."""
    return min(run.cores[process] / run.tokens_per_s for run in runs) * 1e6


def show(count: int, runs: Sequence[Run], base: Sequence[Run], num_bytes: int) -> None:
    speed, base_speed = (statistics.median(run.tokens_per_s for run in of) for of in (runs, base))
    turns = statistics.median(run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, base, strict=True))
    parts = [
        f"{process} {_least_cpu_us(runs, process):.1f} µs ({_least_cpu_us(base, process):.1f})"
        for process in ("host", "engine")
    ]
    print(
        f"{count} viewers: median {speed:.0f} tokens/s ({base_speed:.0f} without), {turns - 1:+.1%} in turns; "
        f"least CPU per token: {', '.join(parts)}; {num_bytes / 1e6:.1f} MB to viewers"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "model_repository" / "demo" / "1", help="a checkpoint")
    parser.add_argument("--viewers", default="3", help="numbers of viewers, separated by commas; default: %(default)s")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    counts = [0, *map(int, arguments.viewers.split(","))]
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(arguments.streams)]
    work = Work(prompts, arguments.tokens, arguments.streams)
    with ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(repository, NAME, {"model": str(arguments.model.resolve()), "max_num_seqs": arguments.streams})
        server = start_tree(ROOT, repository)
        stack.callback(server.stop)
        work.through(server, "generate_stream")
        runs: dict[int, list[Run]] = {count: [] for count in counts}
        sent = dict.fromkeys(counts, 0)
        for round_number in range(arguments.rounds):
            for count in counts if round_number % 2 else counts[::-1]:
                with viewers(server.http, count) as num_bytes:
                    runs[count].append(work.through(server, "generate_stream"))
                sent[count] += num_bytes[0]
        for count in counts[1:]:
            show(count, runs[count], runs[0], sent[count])


if __name__ == "__main__":
    main()
