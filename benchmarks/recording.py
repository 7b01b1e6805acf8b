"""The common part of all drivers: reads the arguments, warms up, runs each workload, writes the results.

Used by the files in drivers/, inside their engines' environments. Independent of engines and of installed packages.
Invariants: greedy, end of sequence ignored, all requests at once, every requested token generated or the run fails;
loading and warm-up are outside the measured time; a result is on disk as soon as its workload is over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from llmbackend.server.process_memory import tree_pss_mb

from .workloads import Request, workload

WARM_UP_RUNS = 2
FIRST_REQUEST = Request(prompt=list(range(100, 108)), output_tokens=1)
"""Shows how long a start takes until the first token."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Recorder:
    """Records when each request's tokens came, and how busy the machine was."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.times_s: list[list[float]] = [[] for _ in requests]

    def start(self) -> None:
        _reset_peak_memory()
        self._busy_s, self._own_s = machine_busy_s(), time.process_time()
        self._start_s = time.perf_counter()

    def tokens(self, index: int, count: int = 1) -> None:
        """Request `index` got `count` new tokens now."""
        self.times_s[index] += [time.perf_counter() - self._start_s] * count

    def stop(self) -> dict[str, Any]:
        """The figures of the run. Raises RuntimeError when tokens are missing."""
        wall_s = time.perf_counter() - self._start_s
        own_s = time.process_time() - self._own_s
        others_s = machine_busy_s() - self._busy_s - own_s
        wanted, got = [request.output_tokens for request in self.requests], list(map(len, self.times_s))
        if got != wanted:
            raise RuntimeError(f"{sum(got)} tokens came, expected {sum(wanted)}")
        prompt_tokens, output_tokens = sum(len(request.prompt) for request in self.requests), sum(wanted)
        gaps_s = [later - sooner for times in self.times_s for sooner, later in pairwise(times)]
        first_s = [times[0] for times in self.times_s]
        return {
            "requests": len(self.requests),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "wall_s": wall_s,
            "output_tokens_per_s": output_tokens / wall_s,
            "total_tokens_per_s": (prompt_tokens + output_tokens) / wall_s,
            "ttft_p50_ms": _percentile_ms(first_s, 50),
            "ttft_p99_ms": _percentile_ms(first_s, 99),
            "itl_p50_ms": _percentile_ms(gaps_s, 50),
            "itl_p99_ms": _percentile_ms(gaps_s, 99),
            "itl_mean_ms": 1e3 * sum(gaps_s) / max(len(gaps_s), 1),
            "peak_rss_mb": peak_memory_mb(),
            "pss_mb": sum(tree_pss_mb().values()),
            "cores_used": own_s / wall_s,
            "other_cores": max(0.0, others_s) / wall_s,
        }


class Engine(Protocol):
    """A loaded engine. `run` calls recorder.start() when it submits the first request, and returns recorder.stop()."""

    description: str

    def run(self, recorder: Recorder) -> dict[str, Any]: ...


def drive(load: Callable[[argparse.Namespace], Engine], parser: argparse.ArgumentParser) -> None:
    """A driver's main program; `parser` holds the driver's own options."""
    parser.add_argument("--model", required=True, help="checkpoint in the engine's own format")
    parser.add_argument("--workloads", default="W1")
    parser.add_argument("--json", type=Path, required=True, help="one line per workload is appended")
    arguments = parser.parse_args()
    engine = load(arguments)
    load_s = seconds_since_process_start()
    engine.run(Recorder([FIRST_REQUEST]))
    first_token_s = seconds_since_process_start()
    for _ in range(WARM_UP_RUNS):
        engine.run(Recorder(workload("W0")))
    for name in arguments.workloads.split(","):
        figures = engine.run(Recorder(workload(name)))
        starts = {"load_s": load_s, "first_token_s": first_token_s}
        append_result(arguments.json, {"workload": name, **starts, **figures, "description": engine.description})


def append_result(path: Path, result: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def seconds_since_process_start() -> float:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS_PER_S


def machine_busy_s() -> float:
    """CPU seconds that all processes of the machine have used."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def peak_memory_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def _reset_peak_memory() -> None:
    with contextlib.suppress(OSError):  # some sandboxes have no such file; the peak is then that of the process so far
        Path("/proc/self/clear_refs").write_text("5")


def _percentile_ms(values_s: list[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's."""
    ordered = sorted(values_s) or [0.0]
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return 1e3 * (ordered[low] + (ordered[high] - ordered[low]) * (place - low))
