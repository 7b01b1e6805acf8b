"""The common part of all programs of the accelerator benchmark: arguments, timing, lines of results.

For: the programs beside this one. Does not know: what they measure. Invariant: a figure is on disk as soon as it is
known, so a program that is ended early keeps what it has measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP_CALLS, TIMED_CALLS = 3, 10


@dataclass(frozen=True)
class Part:
    """One run of one part. device: "cuda", or what the engine calls its stand-in for one; options: "name=value" of
    EngineConfig, changed against the default."""

    name: str
    device: str
    shape: str
    label: str
    json: Path
    scratch: Path
    options: dict[str, Any] = field(default_factory=dict)

    def add(self, **figures: Any) -> None:
        line = {"part": self.name, "shape": self.shape, "label": self.label, **figures}
        print(json.dumps(line), flush=True)
        with self.json.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @staticmethod
    def run(name: str, measure: Callable[[Part], None]) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--shape", default="")
        parser.add_argument("--label", default="", help="of the configuration, in the report")
        parser.add_argument("--json", type=Path, required=True, help="lines are appended")
        parser.add_argument("--scratch", type=Path, required=True)
        parser.add_argument("--options", type=json.loads, default={}, help="fields of EngineConfig, as JSON")
        given = parser.parse_args()
        measure(Part(name, given.device, given.shape, given.label, given.json, given.scratch, given.options))


def seconds_per_call(call: Callable[[], object], device: Any) -> float:
    """Mean of TIMED_CALLS, by the device's own clock where it has one."""
    for _ in range(WARM_UP_CALLS):
        call()
    if device.type == "cuda":
        return _seconds_on_gpu(call)
    start_s = time.perf_counter()
    for _ in range(TIMED_CALLS):
        call()
    return (time.perf_counter() - start_s) / TIMED_CALLS


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
