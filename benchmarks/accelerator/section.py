"""The common part of all sections of the accelerator benchmark: arguments, timing, lines of results.

Used by the neighbouring programs. Independent of what they measure. Invariant: a figure is on disk as soon as it is
known, so a section that is ended early keeps what it has measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP_CALLS, TIMED_CALLS = 3, 10
WORKERS = min(12, os.cpu_count() or 1)
"""Processes that compile and check kernels at the same time, each with a context on the GPU."""

CACHES = 3
"""Times the device's cache: what is read behind so much else comes from memory."""


class WrongResultError(Exception):
    """Something that the section checks does not hold; its figures are in the results."""


@dataclass(frozen=True)
class Section:
    """One section, as it runs. device: "cuda", or "cpu" to try the benchmark itself; options: "name=value" of
    EngineConfig, changed against the default; measures: of those that the program has, () = all."""

    program: str
    device: str
    shape: str
    label: str
    json: Path
    scratch: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    measures: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def wants(self, measure: str) -> bool:
        return not self.measures or measure in self.measures

    def add(self, **figures: Any) -> None:
        line = {"section": self.program, "shape": self.shape, "label": self.label, **figures}
        print(json.dumps(line), flush=True)
        with self.json.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def fail(self, wrong: Sequence[str]) -> None:
        """Raises WrongResultError that names the first of what is wrong, if anything is."""
        if wrong:
            raise WrongResultError(f"{len(wrong)} wrong, the first: {wrong[0]}")


def run_alone(program: str, measure: Callable[[Section], None]) -> None:
    """A section's main program: it runs outside of benchmarks/gpu.py, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="")
    parser.add_argument("--label", default="", help="of the configuration, in the report")
    parser.add_argument("--json", type=Path, required=True, help="lines are appended")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="fields of EngineConfig, as JSON")
    parser.add_argument("--measures", default="", help="only these, by their names")
    given = parser.parse_args()
    measures = tuple(filter(None, given.measures.split(",")))
    measure(
        Section(program, given.device, given.shape, given.label, given.json, given.scratch, given.options, measures)
    )


def in_parallel(work: Callable[[Any], Any], items: Sequence[Any], on_gpu: bool) -> Iterator[Any]:
    """Results in the order in which they are there. `work` must not raise. Called before this process uses a GPU: the
    workers are forked."""
    if not on_gpu:
        yield from map(work, items)
        return
    with multiprocessing.get_context("fork").Pool(min(WORKERS, len(items))) as pool:
        yield from pool.imap_unordered(work, items)


def seconds_per_call(call: Callable[[], object], device: Any) -> float:
    """Mean of TIMED_CALLS, by the device's own clock. Elsewhere nothing is measured, and one call does."""
    if device.type == "cuda":
        for _ in range(WARM_UP_CALLS):
            call()
        return _seconds_on_gpu(call)
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def median_seconds(call: Callable[[], object], device: Any, runs: int = 5) -> float:
    """The median of some runs of `seconds_per_call`."""
    return statistics.median(seconds_per_call(call, device) for _ in range(runs if device.type == "cuda" else 1))


def seconds_in_graph(calls: Sequence[Callable[[], object]], device: Any) -> float:
    """The median of one of `calls`, which a GPU replays one behind the other from a graph: the host's time for a launch
    does not count. Where calls read different memory, more of it than a cache holds, it comes from the device's."""
    if device.type != "cuda":
        return seconds_per_call(calls[0], device)
    import torch

    for call in calls:  # what is compiled, or allocated once, is no part of a graph
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_seconds(graph.replay, device) / len(calls)


def copies_beyond_cache(num_bytes: int, device: Any) -> int:
    """How many pieces of memory of this size do not fit into the device's cache together."""
    if device.type != "cuda":
        return 2
    import torch

    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-CACHES * cache_bytes // num_bytes))


def _seconds_on_gpu(call: Callable[[], object]) -> float:
    import torch

    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(TIMED_CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / TIMED_CALLS
