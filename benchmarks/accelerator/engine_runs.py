"""Our engine on one shape: start-up, decode steps by batch size, prefill, and whole workloads.

    python -m benchmarks.accelerator.engine_runs --shape llama-3.1-8b --device cuda --json FILE --scratch FOLDER

For the figures of the engine alone. Independent of servers, peers and ceilings. Invariants: greedy, end of sequence
ignored, the prefix cache off, so that every token is computed; every requested token is generated or the run fails; a
decode step counts only when all rows of the batch decode in it; a model that runs as modules fails, with its figures.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from benchmarks.recording import Recorder, seconds_since_process_start
from benchmarks.workloads import Request

from .engines import SCALE, engine_config, infer_requests, requests_of, steps, why_slow
from .section import Section, run_alone
from .shapes import SHAPES, Shape

DECODE_OUTPUT_TOKENS = 96
DECODE = ((1, 256), (8, 256), (64, 256), (256, 256), (64, 2048))
"""Rows of a step, and tokens of each one's prompt."""
PREFILL = {"prefill 1 x 2048": (1, 2048), "prefill 16 x 1024": (16, 1024)}


def measure(section: Section) -> None:
    from llmbackend.engine.offline import OfflineEngine

    shape, scale = SHAPES[section.shape], SCALE.get(section.shape, 1)
    config = engine_config(section, enable_prefix_caching=False)
    with OfflineEngine(config) as engine:
        ready_s = seconds_since_process_start()
        section.add(measure="start", ready_s=ready_s, load_s=engine.info.load_s, description=engine.info.description)
        _run(engine, requests_of(shape, [(48, 8)] * 8))
        for batch, prompt_tokens in DECODE:
            if batch <= config.max_num_seqs // scale and section.wants("decode"):
                _decode(section, shape, engine, batch, prompt_tokens // scale, DECODE_OUTPUT_TOKENS // min(scale, 4))
        for name, (count, tokens) in PREFILL.items():
            if section.wants("prefill"):
                _prefill(section, shape, engine, name, count, tokens // scale)
        for name, requests in workloads(shape, scale).items():
            if section.wants("workload"):
                section.add(measure="workload", workload=name, **_run(engine, requests))
        section.fail(why_slow(section, engine))


def workloads(shape: Shape, scale: int) -> dict[str, list[Request]]:
    """As W1 and W2 of the CPU's comparison, with more requests."""
    draw = random.Random(77)
    mixed = [(draw.randint(16, 512), draw.randint(16, 128)) for _ in range(1024 // scale)]
    mixed = [(max(prompt // scale, 1), max(output // scale, 1)) for prompt, output in mixed]
    return {
        f"{256 // scale} requests, 32 in, 128 out": requests_of(shape, [(32, 128 // scale)] * (256 // scale)),
        f"{1024 // scale} requests, 16 to 512 in, 16 to 128 out": requests_of(shape, mixed),
    }


def _decode(section: Section, shape: Shape, engine: Any, batch: int, prompt: int, output: int) -> None:
    """The median time from one full decode step's result to the next one's. prompt, output: tokens of a request."""
    steps_s, hosts_s, before_s = [], [], 0.0
    for result in engine.generate(infer_requests(requests_of(shape, [(prompt, output)] * batch))):
        now_s = time.perf_counter()
        if before_s and len(result.outputs) == batch and not any(given.finish_reason for given in result.outputs):
            steps_s.append(now_s - before_s)
            hosts_s.append(result.stats.last_host_s)
        before_s = now_s if len(result.outputs) == batch else 0.0
    section.add(
        measure="decode",
        batch=batch,
        prompt_tokens=prompt,
        step_s=statistics.median(steps_s),
        host_s=statistics.median(hosts_s),
        floor_bytes=shape.decode_bytes(batch, prompt + output / 2),
        num_steps=len(steps_s),
    )


def _prefill(section: Section, shape: Shape, engine: Any, name: str, count: int, tokens: int) -> None:
    figures = _run(engine, requests_of(shape, [(tokens, 1)] * count))
    section.add(
        measure="prefill",
        workload=name,
        prompt_tokens_per_s=figures["prompt_tokens"] / figures["wall_s"],
        flops=shape.prefill_flops(count, tokens) / figures["wall_s"],
    )


def _run(engine: Any, requests: list[Request]) -> dict[str, Any]:
    recorder = Recorder(requests)
    recorder.start()
    for result in steps(engine, infer_requests(requests)):
        for output in result.outputs:
            recorder.tokens(int(output.request_id), len(output.token_ids))
    return recorder.stop()


if __name__ == "__main__":
    run_alone("engine_runs", measure)
