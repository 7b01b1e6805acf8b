"""How late the events of steps reach a viewer of /v2/engine/events: from a step's end until its event is read.

    python -m benchmarks.feed_delay

For: the claim that the pages show what was at most a quarter of a second ago. Does not know: what the events say. The
server runs the bundled model for 1 and for 64 streams; events are collected for 100 ms, as the pages ask for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llmbackend import Server


def delays_ms(url: str, stopped: threading.Event) -> Iterator[float]:
    """Of each step, until `stopped`."""
    with urllib.request.urlopen(f"{url}/v2/engine/events?kinds=steps") as response:
        for line in response:
            now_s = time.time()
            if line.startswith(b"data:") and b'"steps"' in line:
                for step in json.loads(line[5:])["steps"]:
                    yield (now_s - step["time"]) * 1e3 - step["duration_ms"]
            if stopped.is_set():
                return


def ask(url: str, number: int, tokens: int) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": f"Number {number}.", "max_tokens": tokens}
    body |= {"stream": True, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as response:
        response.read()


def measure(url: str, streams: int, tokens: int) -> list[float]:
    """The delays of the steps of so many streams."""
    stopped = threading.Event()
    with ThreadPoolExecutor(streams + 1) as pool:
        viewer = pool.submit(lambda: list(delays_ms(url, stopped)))
        time.sleep(0.5)
        for answer in [pool.submit(ask, url, number, tokens) for number in range(streams)]:
            answer.result()
        stopped.set()
        ask(url, 0, 1)  # a last event, for the viewer to see that it is over
        return viewer.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=800, help="per stream")
    tokens = parser.parse_args().tokens
    with Server(demo=True) as server:
        for streams in (1, 64):
            delays = sorted(measure(server.http_url, streams, tokens))
            print(
                f"{streams} streams: median {statistics.median(delays):.0f} ms, 99 % within "
                f"{delays[int(len(delays) * 0.99)]:.0f} ms, at most {delays[-1]:.0f} ms, of {len(delays)} steps"
            )


if __name__ == "__main__":
    main()
