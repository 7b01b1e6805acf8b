"""Which kernels a step consists of: calls and time of each, for decode at several batches and for mixed steps.

    python -m benchmarks.accelerator.kernel_table --shape llama-3.1-8b --device cuda --json FILE --scratch FOLDER

Shows what is worth optimising. Invariants: one profile covers PROFILED_STEPS steps of one kind; its time is divided by
their number; `busy` is the share of the profiled time in which the device computed, as far as kernels do not overlap.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from .engines import SCALE, engine_config, infer_requests, requests_of, steps
from .section import Section, run_alone
from .shapes import SHAPES

BATCHES = (1, 64, 256)
DECODE_PROMPT_TOKENS, MIXED_PROMPT_TOKENS, OUTPUT_TOKENS = 256, 512, 96
WARM_UP_STEPS, PROFILED_STEPS = 10, 20
ROWS = 25
"""Kernels of a table, those that take the most time."""
MAX_NAME = 110


def measure(section: Section) -> None:
    from llmbackend.engine.make_runner import make_runner
    from llmbackend.engine.offline import OfflineEngine

    shape, scale = SHAPES[section.shape], SCALE.get(section.shape, 1)
    limits = {"max_num_seqs": 256 // scale, "max_num_batched_tokens": max(2048 // scale, 64)}
    config = engine_config(section, enable_prefix_caching=False, **limits)
    output = OUTPUT_TOKENS // min(scale, 2)
    with OfflineEngine(config, make_runner) as engine:
        list(steps(engine, infer_requests(requests_of(shape, [(48, 8)] * 8))))
        for batch in (batch for batch in BATCHES if batch <= config.max_num_seqs):
            lengths = [(DECODE_PROMPT_TOKENS // scale, output)] * batch
            _table(section, engine, f"decode {batch}", requests_of(shape, lengths), _all_decode(batch))
        # Requests that end at different steps let new ones in, so that nearly every step has a prompt's tokens, too.
        lengths = [(MIXED_PROMPT_TOKENS // scale, 2 + index % output) for index in range(768 // scale)]
        _table(section, engine, "mixed", requests_of(shape, lengths), _Mixed())


def _all_decode(batch: int) -> Callable[[Any], bool]:
    return lambda result: len(result.outputs) == batch and not any(one.finish_reason for one in result.outputs)


class _Mixed:
    """Whether a step let new requests in, whose prompts it began to compute, beside others."""

    def __init__(self) -> None:
        self._num_waiting = 0

    def __call__(self, result: Any) -> bool:
        before, self._num_waiting = self._num_waiting, result.stats.num_requests_waiting
        return self._num_waiting < before and bool(result.outputs)


def _table(section: Section, engine: Any, case: str, requests: Sequence[Any], is_wanted: Callable[[Any], bool]) -> None:
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA if section.on_gpu else torch.profiler.ProfilerActivity.CPU]
    results = _wanted(engine, requests, is_wanted)
    for _ in range(WARM_UP_STEPS):
        next(results, None)
    before_s, times_s = time.perf_counter(), []
    with torch.profiler.profile(activities=activities) as profile:
        for _, _result in zip(range(PROFILED_STEPS), results, strict=False):
            times_s.append(time.perf_counter() - before_s)
            before_s = time.perf_counter()
    results.close()
    if not times_s:
        raise RuntimeError(f"{case}: no step of this kind came")
    _lines(section, case, profile, times_s)


def _wanted(engine: Any, requests: Sequence[Any], is_wanted: Callable[[Any], bool]) -> Generator[Any, None, None]:
    for result in steps(engine, infer_requests(requests)):
        if is_wanted(result):
            yield result


def _lines(section: Section, case: str, profile: Any, times_s: Sequence[float]) -> None:
    attribute = "self_device_time_total" if section.on_gpu else "self_cpu_time_total"
    kernels = sorted(profile.key_averages(), key=lambda one: -getattr(one, attribute))
    total_us = sum(getattr(one, attribute) for one in kernels)
    count, wall_s = len(times_s), sum(times_s)
    section.add(
        measure="profile", case=case, steps=count, step_s=statistics.median(times_s), busy=total_us / 1e6 / wall_s
    )
    for kernel in kernels[:ROWS]:
        us = getattr(kernel, attribute)
        figures = {"calls_per_step": kernel.count / count, "us_per_step": us / count, "share": us / max(total_us, 1)}
        section.add(measure="kernel", case=case, kernel=kernel.key[:MAX_NAME], **figures)


if __name__ == "__main__":
    run_alone("kernel_table", measure)
