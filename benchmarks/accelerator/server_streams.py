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
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoints import write_tokenizer
from benchmarks.host_cpu_per_token import start, stream

from .engine_runs import ENGINE, MAX_MODEL_LEN, SCALE
from .part import Part
from .shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENTS = (64, 256)
PROMPT, OUTPUT_TOKENS = "a few words that stand for a prompt of some thirty tokens, more or less, as people write", 128
PATH = f"/v2/models/{(NAME := 'bench')}/generate_stream"


def measure(part: Part) -> None:
    scale = SCALE.get(part.shape, 1)
    with _server(part) as (process, host, port):
        asyncio.run(_load(host, port, 8, 8))
        for clients in (count // scale for count in CLIENTS):
            before, start_s = process.cpu_times(), time.perf_counter()
            tokens = asyncio.run(_load(host, port, clients, OUTPUT_TOKENS // scale))
            wall_s, after = time.perf_counter() - start_s, process.cpu_times()
            cpu_s = after.user + after.system - before.user - before.system
            part.add(
                measure="server",
                clients=clients,
                output_tokens_per_s=tokens / wall_s,
                host_cpu_us_per_token=cpu_s / tokens * 1e6,
                host_cores=cpu_s / wall_s,
            )


@contextlib.contextmanager
def _server(part: Part) -> Iterator[tuple[psutil.Process, str, int]]:
    process, host, port = start(ROOT, _repository(part))
    try:
        yield psutil.Process(process.pid), host, port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _repository(part: Part) -> Path:
    repository, shape = part.scratch / f"repository-{part.shape}", SHAPES[part.shape]
    version = shape.write(repository / NAME / "1")
    write_tokenizer(version, shape.vocab_size)
    arguments = {**ENGINE, "max_model_len": min(MAX_MODEL_LEN, shape.max_position_embeddings), **part.options}
    model = {"model": str(version), "load_format": "dummy", "device": part.device, **arguments}
    (version / "model.json").write_text(json.dumps(model))
    (repository / NAME / "config.pbtxt").write_text('backend: "llm"\n')
    return repository


async def _load(host: str, port: int, clients: int, output_tokens: int) -> int:
    """Tokens of all clients together. Raises RuntimeError when a stream is short."""
    body: dict[str, Any] = {"text_input": PROMPT, "stream": True, "max_tokens": output_tokens, "ignore_eos": True}
    events = await asyncio.gather(*(stream(host, port, PATH, body | {"seed": i}) for i in range(clients)))
    if min(events) < 1:
        raise RuntimeError("a stream ended without a token")
    return clients * output_tokens


if __name__ == "__main__":
    Part.run("server_streams", measure)
