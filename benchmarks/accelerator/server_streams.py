"""Our server on one shape: many clients that stream at once, and the CPU time of the host process per token.

    python -m benchmarks.accelerator.server_streams --shape qwen2.5-0.5b --device cuda --json FILE --scratch FOLDER

For: the share of the engine's speed that reaches clients. Does not know: the engine's figures alone; engine_runs
measures the same requests. Invariants: all clients send one request each, at the same time, over server-sent events;
a stream with fewer events than tokens fails the run; the CPU time is that of the server's first process, without the
engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkpoints import write_tokenizer
from benchmarks.stream_clients import at_once, http_request, http_stream
from benchmarks.stream_servers import Server, start_tree

from .engine_runs import ENGINE, MAX_MODEL_LEN, SCALE
from .part import Part
from .shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENTS = (64, 256)
NAME = "bench"
PROMPT, OUTPUT_TOKENS = "a few words that stand for a prompt of some thirty tokens, more or less, as people write", 128


def measure(part: Part) -> None:
    scale = SCALE.get(part.shape, 1)
    with _server(part) as server:
        asyncio.run(_load(server.http, 8, 8))
        for clients in (count // scale for count in CLIENTS):
            before, start_s = server.cpu(), time.perf_counter()
            tokens = asyncio.run(_load(server.http, clients, OUTPUT_TOKENS // scale))
            wall_s, cpu_s = time.perf_counter() - start_s, (server.cpu() - before).total_s
            part.add(
                measure="server",
                clients=clients,
                output_tokens_per_s=tokens / wall_s,
                host_cpu_us_per_token=cpu_s / tokens * 1e6,
                host_cores=cpu_s / wall_s,
            )


@contextlib.contextmanager
def _server(part: Part) -> Iterator[Server]:
    server = start_tree(ROOT, _repository(part))
    try:
        yield server
    finally:
        server.stop()


def _repository(part: Part) -> Path:
    repository, shape = part.scratch / f"repository-{part.shape}", SHAPES[part.shape]
    version = shape.write(repository / NAME / "1")
    write_tokenizer(version, shape.vocab_size)
    arguments = {**ENGINE, "max_model_len": min(MAX_MODEL_LEN, shape.max_position_embeddings), **part.options}
    model = {"model": str(version), "load_format": "dummy", "device": part.device, **arguments}
    (version / "model.json").write_text(json.dumps(model))
    (repository / NAME / "config.pbtxt").write_text('backend: "llm"\n')
    return repository


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
    Part.run("server_streams", measure)
