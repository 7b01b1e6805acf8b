"""`llmbackend bench`: one workload through the engine, all requests at once, and what it took.

For: comparing engines and watching our own speed. Does not know: servers or protocols; it measures the engine alone, in
its own process. Invariant: every request generates exactly the tokens the workload asks for (greedy, end of sequence
ignored), or the run fails; the model's loading and one short warm-up are not part of the measured time.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.infer_request import InferRequest, ModelInfo, SamplingParams
from llmbackend.engine.offline import Engine

WARM_UP_REQUESTS, WARM_UP_PROMPT_TOKENS, WARM_UP_OUTPUT_TOKENS = 8, 48, 8


class WorkloadItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a workload file: a prompt, or the length of a random one, and how many tokens to generate."""

    output_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if bool(self.prompt_token_ids) == bool(self.prompt_tokens):
            raise ValueError("a workload item needs either 'prompt_token_ids' or 'prompt_tokens', and not both")
        if self.prompt_tokens < 0 or self.output_tokens < 1:
            raise ValueError(
                f"a workload item has prompt_tokens {self.prompt_tokens} and output_tokens {self.output_tokens}, "
                "expected at least 1 each"
            )


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measured. Times to first token count from the submission of all requests."""

    model: str
    dtype: str
    device: str
    description: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    peak_rss_mb: float
    load_s: float
    num_steps: int
    num_preemptions: int


class _Times:
    """When each request's tokens came, in seconds since the start."""

    def __init__(self) -> None:
        self.tokens_s: dict[str, list[float]] = {}
        self.wall_s = 0.0
        self.num_steps = 0
        self.num_preemptions = 0

    @property
    def first_token_s(self) -> list[float]:
        return [times[0] for times in self.tokens_s.values()]

    @property
    def gaps_s(self) -> list[float]:
        return [later - sooner for times in self.tokens_s.values() for sooner, later in pairwise(times)]


def run_bench(
    model: str,
    workload_path: Path,
    dtype: str = "auto",
    json_path: Path | None = None,
    seed: int = 0,
    **engine_arguments: Any,
) -> BenchResult:
    """Runs a workload file and prints a table; `json_path` gets the same figures as JSON.

    `engine_arguments` are further fields of EngineConfig. Raises ValueError for a bad file or argument, RuntimeError
    when a request cannot be served as asked.
    """
    config = msgspec.convert({"model": model, "dtype": dtype, "seed": seed, **engine_arguments}, EngineConfig)
    items = read_workload(workload_path)
    start_s = time.perf_counter()
    with Engine(config) as engine:
        load_s = time.perf_counter() - start_s
        requests = make_requests(items, engine.info, seed)
        _warm_up(engine, seed)
        times = _measure(engine, requests)
        result = _result(model, engine.info, requests, times, load_s)
    _print(result, workload_path.name)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return result


def read_workload(path: Path) -> list[WorkloadItem]:
    """Raises ValueError naming the item and field that is wrong."""
    try:
        items = msgspec.json.decode(path.read_bytes(), type=list[WorkloadItem])
    except msgspec.DecodeError as error:
        raise ValueError(f"workload file {path.name}: {error}") from error
    if not items:
        raise ValueError(f"workload file {path.name} is an empty list, expected at least 1 request")
    return items


def make_requests(items: list[WorkloadItem], info: ModelInfo, seed: int) -> list[InferRequest]:
    """Greedy requests that ignore the end of sequence; random prompts depend on (seed, place in the file) alone."""
    requests = []
    for index, item in enumerate(items):
        draw = np.random.default_rng([seed, index])
        prompt = item.prompt_token_ids or tuple(draw.integers(0, info.vocab_size, item.prompt_tokens).tolist())
        sampling = SamplingParams(max_tokens=item.output_tokens, temperature=0.0, ignore_eos=True)
        requests.append(InferRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    return requests


def _warm_up(engine: Engine, seed: int) -> None:
    item = WorkloadItem(prompt_tokens=WARM_UP_PROMPT_TOKENS, output_tokens=WARM_UP_OUTPUT_TOKENS)
    for _ in engine.generate(make_requests([item] * WARM_UP_REQUESTS, engine.info, seed + 1)):
        pass


def _measure(engine: Engine, requests: list[InferRequest]) -> _Times:
    times = _Times()
    gc.collect()
    start_s = time.perf_counter()
    for result in engine.generate(requests):
        now_s = time.perf_counter() - start_s
        for output in result.outputs:
            if output.error:
                raise RuntimeError(f"request {output.request_id} of the workload: {output.error}")
            times.tokens_s.setdefault(output.request_id, []).extend([now_s] * len(output.token_ids))
        times.wall_s = now_s
        times.num_steps += 1
        times.num_preemptions = result.stats.num_preemptions
    for request in requests:
        expected, got = request.sampling.max_tokens, len(times.tokens_s[request.request_id])
        if got != expected:
            raise RuntimeError(f"request {request.request_id} of the workload gave {got} tokens, expected {expected}")
    return times


def _result(model: str, info: ModelInfo, requests: list[InferRequest], times: _Times, load_s: float) -> BenchResult:
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = sum(request.sampling.max_tokens for request in requests)
    rss_unit_bytes = 1 if sys.platform == "darwin" else 1024
    return BenchResult(
        model=model,
        dtype=info.dtype,
        device=info.device,
        description=info.description,
        requests=len(requests),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        wall_s=times.wall_s,
        output_tokens_per_s=output_tokens / times.wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / times.wall_s,
        ttft_p50_ms=_percentile_ms(times.first_token_s, 50),
        ttft_p99_ms=_percentile_ms(times.first_token_s, 99),
        itl_p50_ms=_percentile_ms(times.gaps_s, 50),
        itl_p99_ms=_percentile_ms(times.gaps_s, 99),
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * rss_unit_bytes / 1e6,
        load_s=load_s,
        num_steps=times.num_steps,
        num_preemptions=times.num_preemptions,
    )


def _percentile_ms(values_s: list[float], percent: float) -> float:
    return float(np.percentile(values_s, percent)) * 1e3 if values_s else 0.0


def _print(result: BenchResult, title: str) -> None:
    table = Table("measure", "value")
    table.columns[1].justify = "right"
    for name, value in msgspec.structs.asdict(result).items():
        if not isinstance(value, str):
            table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    console = Console()
    console.print(f"{title} on {result.model} ({result.dtype}, {result.device})", style="bold")
    console.print(table)
    if result.description:
        console.print(result.description, style="dim")
