"""Our server on one shape: many concurrent streaming clients, and the host process's CPU time per token.

    python -m benchmarks.accelerator.server_streams --shape qwen2.5-0.5b --device cuda --json FILE --scratch FOLDER

For the fraction of the engine's speed that reaches clients. Independent of the engine's figures alone; engine_runs
measures the same requests. Invariants: all clients send one request each, at the same time, over server-sent events; a
stream without a token fails the run; the CPU time is that of the server's first process, without the engine's.
"""

from __future__ import annotations

import asyncio
import time

from benchmarks.stream_clients import at_once, http_request, http_stream

from .engines import SCALE
from .section import Section, run_alone
from .served_shape import NAME, serving

CLIENTS = (64, 256)
PROMPT, OUTPUT_TOKENS = "a prompt of some 32 byte tokens.", 128


def measure(section: Section) -> None:
    scale = SCALE.get(section.shape, 1)
    with serving(section) as server:
        asyncio.run(_load(server.http, 8, 8))
        for clients in (count // scale for count in CLIENTS):
            before, start_s = server.cpu(), time.perf_counter()
            tokens = asyncio.run(_load(server.http, clients, OUTPUT_TOKENS // scale))
            wall_s, cpu_s = time.perf_counter() - start_s, (server.cpu() - before).total_s
            section.add(
                measure="server",
                clients=clients,
                output_tokens_per_s=tokens / wall_s,
                host_cpu_us_per_token=cpu_s / tokens * 1e6,
                host_cores=cpu_s / wall_s,
            )


async def _load(address: str, clients: int, output_tokens: int) -> int:
    """Tokens of all clients together. Raises RuntimeError when a stream is short."""
    sampling = {"text_input": PROMPT, "ignore_eos": True}
    requests = [
        http_request("generate_stream", NAME, output_tokens, seed=index, **sampling) for index in range(clients)
    ]
    streamed = await at_once(clients, lambda index: http_stream(address, requests[index]))
    if min(one.events for one in streamed) < 1:
        raise RuntimeError("a stream ended without a token")
    return clients * output_tokens


if __name__ == "__main__":
    run_alone("server_streams", measure)
