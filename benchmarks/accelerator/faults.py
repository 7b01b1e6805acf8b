"""Engines that die while streams are live: killed, or by a persistent GPU error. No token may be lost or changed.

    python -m benchmarks.accelerator.faults --shape qwen2.5-0.5b --device cuda --json FILE --scratch FOLDER

For recovery of an engine process with a GPU. Independent of how it recovers. Invariants: each fault occurs when every
stream has got some tokens and none has all; a stream's token ids are compared with those of the same request without a
fault; `batch_invariant`, so that tokens computed again are the same bits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.stream_servers import Server

from .section import Section, run_alone
from .served_shape import NAME, serving

STREAMS, OUTPUT_TOKENS = 64, 192
FEW_STREAMS, FEW_TOKENS = 6, 448
"""Where there is no GPU: long enough that a fault strikes before a tiny model ends."""
DEVICE_ERROR, DEVICE_LOST = "device-error", "device-lost"
"""Faults that the engine commits itself (llmbackend/testing/faults.py)."""


@dataclass
class _Streams:
    """Token ids of all streams so far."""

    tokens: list[list[int]]

    @property
    def all_began(self) -> bool:
        return all(self.tokens)


def measure(section: Section) -> None:
    directory = section.scratch / "faults"
    directory.mkdir(exist_ok=True)
    size = (STREAMS, OUTPUT_TOKENS) if section.on_gpu else (FEW_STREAMS, FEW_TOKENS)
    arguments = {"fault_directory": str(directory), **({"batch_invariant": True} if section.on_gpu else {})}
    wrong = []
    with serving(section, **arguments) as server:
        asyncio.run(_streamed(server, size, None))
        start_s = time.perf_counter()
        expected = asyncio.run(_streamed(server, size, None))
        calm_s = time.perf_counter() - start_s
        itself = DEVICE_ERROR if section.on_gpu else DEVICE_LOST
        faults: dict[str, Callable[[], None]] = {
            "kill -9": lambda: _kill(server, directory),
            itself: lambda: (directory / itself).touch(),
        }
        for name, strike in faults.items():
            start_s = time.perf_counter()
            found = asyncio.run(_streamed(server, size, strike))
            line = _compared(found, expected)
            section.add(
                measure="fault", case=name, streams=size[0], **line, extra_s=time.perf_counter() - start_s - calm_s
            )
            if line["lost"] or line["changed"]:
                wrong.append(f"{name}: {line['lost']} tokens lost, {line['changed']} streams changed")
        if list(directory.iterdir()):
            wrong.append("a fault was not taken by any engine")
    section.fail(wrong)


def _compared(found: list[list[int]], expected: list[list[int]]) -> dict[str, int]:
    pairs = list(zip(found, expected, strict=True))
    return {
        "lost": sum(max(len(theirs) - len(ours), 0) for ours, theirs in pairs),
        "changed": sum(ours != theirs[: len(ours)] for ours, theirs in pairs),
    }


async def _streamed(server: Server, size: tuple[int, int], strike: Callable[[], None] | None) -> list[list[int]]:
    """size: streams, and tokens of each."""
    count, output_tokens = size
    streams = _Streams([[] for _ in range(count)])
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(_stream(server.http, index, streams, output_tokens))
        if strike is not None:
            while not streams.all_began:
                await asyncio.sleep(0.005)
            strike()
    return streams.tokens


async def _stream(address: str, index: int, streams: _Streams, output_tokens: int) -> None:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    writer.write(_request(index, output_tokens))
    while (line := await reader.readline()) and line != b"0\r\n":
        if line.startswith(b"data: {"):
            event = json.loads(line[len(b"data: ") :])
            ids: Any = event.get("output_ids", [])
            streams.tokens[index] += ids if isinstance(ids, list) else [ids]
    writer.close()


def _request(index: int, output_tokens: int) -> bytes:
    body = {
        "text_input": f"stream {index} of many", "stream": True, "max_tokens": output_tokens, "ignore_eos": True,
        "temperature": 0.8 * (index % 2), "seed": index, "return_output_ids": True,
    }  # fmt: skip
    content = json.dumps(body).encode()
    head = f"POST /v2/models/{NAME}/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _kill(server: Server, directory: Path) -> None:
    """The engine's process: the newest whose command line holds the engine's arguments."""
    mark, found = str(directory), []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if mark in " ".join(child.cmdline()):
            found.append(child)
    os.kill(max(found, key=lambda child: (child.create_time(), child.pid)).pid, signal.SIGKILL)


if __name__ == "__main__":
    run_alone("faults", measure)
