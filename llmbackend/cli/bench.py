"""`llmbackend bench`: runs one workload through the engine alone, in this process, submitting all requests at once.

For comparing engines, versions of this one, and its optimisations. Invariants: every request generates exactly the
tokens of the workload (greedy, end of sequence ignored), or the run fails; loading and one short warm-up are not
measured.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from llmbackend.adapter.engine_args import check_checkpoint
from llmbackend.adapter.gguf_models import with_directories
from llmbackend.core.errors import TritonError
from llmbackend.engine.config import GPU_DEFAULTS, EngineConfig
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import EngineStats, InferRequest, ModelInfo, SamplingParams
from llmbackend.engine.offline import OfflineEngine, make_served_runner
from llmbackend.fork_server.process_resources import process_age_s
from llmbackend.server.process_memory import peak_rss_mb, tree_pss_mb

from ..server.start_failure import as_flags, flag_of
from .bench_plots import Measured, print_plots, write_svg
from .command_line import bad_option

WARM_UP_REQUESTS, WARM_UP_PROMPT_TOKENS, WARM_UP_OUTPUT_TOKENS = 8, 48, 8
_OWN_FLAGS: Final = frozenset(
    {"model", "dtype", "device", "load_format", "max_num_seqs", "max_num_batched_tokens", "quantization"}
)
"""Engine arguments that are also flags of this command."""
ABLATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "no overlap": {"async_scheduling": False},
    "no speculation": {"speculative_config": None},
    "speculation": {"speculative_config": {"method": "ngram"}},
    "modules, no program": {"enforce_eager": True},
    "torch kernels": {"kernels": "torch"},
    "one thread": {"num_threads": 1},
}
"""The changes made by `--ablate`, one at a time, unless the configuration already has them."""


class WorkloadItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a workload file: a prompt, or the length of a random one, and the number of tokens to generate."""

    output_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if bool(self.prompt_token_ids) == bool(self.prompt_tokens):
            raise ValueError("a workload item needs either 'prompt_token_ids' or 'prompt_tokens', not both")
        if self.prompt_tokens < 0 or self.output_tokens < 1:
            raise ValueError(
                f"a workload item has prompt_tokens {self.prompt_tokens} and output_tokens {self.output_tokens}, "
                "expected at least 1 each"
            )


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a run. A step consists of the engine core's own work (schedule, commit, outputs: `host`) and the
    runner's two parts, forward and sample."""

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
    """Time to first token, measured from the submission of all requests."""
    ttft_p99_ms: float
    itl_p50_ms: float
    """Inter-token latency."""
    itl_p99_ms: float
    itl_mean_ms: float
    peak_rss_mb: float
    pss_mb: float
    """Memory of this process and its children after the run; 0 if unknown, like the next two fields."""
    weights_mb: float
    """Packed weights that every step reads; 0 for a model computed by modules, whose weights are part of the rest."""
    kv_mb: float
    """KV blocks, at peak usage."""
    other_mb: float
    load_s: float
    """The engine's part of `ready_s`."""
    ready_s: float
    """Time from the start of the process to a loaded model."""
    cpu_s: float
    """CPU time of the whole process."""
    cores_used: float
    """Over the measured time."""
    num_steps: int
    num_preemptions: int
    cached_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    step_ms: float
    """Mean per step, like the next three."""
    forward_ms: float
    sample_ms: float
    host_us_per_step: float


class _Times:
    """When each request's tokens arrived, in seconds since the start, and the times of the steps."""

    def __init__(self, before: EngineStats) -> None:
        self.tokens_s: dict[str, list[float]] = {}
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self.step_s = 0.0
        self.host_s = 0.0
        self.forward_s = 0.0
        self.sample_s = 0.0
        self.peak_blocks = 0
        self.before = before
        self.after = before

    @property
    def first_token_s(self) -> list[float]:
        return [times[0] for times in self.tokens_s.values()]

    @property
    def num_steps(self) -> int:
        return self.after.num_steps - self.before.num_steps

    def add_step(self, stats: EngineStats) -> None:
        self.step_s += stats.last_step_s
        self.host_s += stats.last_host_s
        self.forward_s += stats.last_forward_s
        self.sample_s += stats.last_sample_s
        self.peak_blocks = max(self.peak_blocks, stats.num_blocks - stats.num_free_blocks)
        self.after = stats

    @property
    def measured(self) -> Measured:
        tokens_s = [time_s for times in self.tokens_s.values() for time_s in times]
        return Measured(self.first_token_s, self.gaps_s, tokens_s)

    @property
    def gaps_s(self) -> list[float]:
        return [later - sooner for times in self.tokens_s.values() for sooner, later in pairwise(times)]


def further_arguments(text: str) -> dict[str, Any]:
    """The engine arguments of `--engine-args`. Raises BadParameter."""
    flag = "--engine-args"
    try:
        values = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise bad_option(flag, f"{flag} is '{text}', expected a JSON object: {error}") from None
    if own := _OWN_FLAGS & values.keys():
        raise bad_option(flag, f"{flag} names '{min(own)}', expected {flag_of(min(own))} instead")
    try:
        msgspec.convert({"model": "checkpoint", **values}, EngineConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise bad_option(flag, f"{flag} is '{text}': {error}") from None
    return values


def check_model(engine: Mapping[str, Any]) -> None:
    """engine: fields of EngineConfig. Raises BadParameter for a path that has no checkpoint."""
    try:
        check_checkpoint(msgspec.convert(engine, EngineConfig))
    except TritonError as error:
        raise bad_option("--model", as_flags(error.message)) from None


def check_output(flag: str, path: Path | None) -> None:
    """Raises BadParameter if the file could not be written after the run."""
    if path is None:
        return
    if path.is_dir():
        raise bad_option(flag, f"{flag} is '{path}', which is a directory, expected a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise bad_option(flag, f"{flag} is '{path}', which cannot be written")


def check_task(workload: Path | None, profile: bool, of_workloads: Mapping[str, object]) -> None:
    """of_workloads: the flags that only workloads have. Raises BadParameter."""
    if profile == (workload is not None):
        raise bad_option("--workload", "expected either --workload or --profile")
    if profile and (given := next((flag for flag, value in of_workloads.items() if value), None)):
        raise bad_option(given, f"{given} applies only to --workload and cannot be combined with --profile")


def run_bench(
    model: str,
    workload_path: Path,
    dtype: str = "auto",
    json_path: Path | None = None,
    seed: int = 0,
    ablate: bool = False,
    as_served: bool = False,
    plot_path: Path | None = None,
    **engine_arguments: Any,
) -> BenchResult:
    """Runs a workload file and prints a table and plots. `json_path` gets the same figures as JSON, `plot_path` the
    plots as SVG.

    `engine_arguments`: additional fields of EngineConfig. `ablate`: runs the workload again with each optimisation
    turned off in turn. `as_served`: takes the weights from the cache, as a server does, after packing them into it if
    they are missing; otherwise this process loads the checkpoint. Raises ValueError for an invalid file or argument,
    RuntimeError if a request cannot be served.
    """
    arguments = {"model": model, "dtype": dtype, "seed": seed, **engine_arguments}
    if arguments.get("device", "cpu") != "cpu":
        arguments = {**GPU_DEFAULTS, **arguments}
    items = read_workload(workload_path)
    result, measured = _run(arguments, items, as_served)
    _print(result, workload_path.name)
    print_plots(measured, Console(highlight=False))
    if plot_path is not None:
        write_svg(measured, plot_path, f"{workload_path.name} on {result.model} ({result.dtype}, {result.device})")
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if ablate:
        _ablate(arguments, items, result)
    return result


def _run(arguments: Mapping[str, Any], items: list[WorkloadItem], as_served: bool) -> tuple[BenchResult, Measured]:
    config = with_directories(msgspec.convert(arguments, EngineConfig))
    start_s = time.perf_counter()
    with OfflineEngine(config, make_served_runner if as_served else make_runner) as engine:
        load_s, ready_s = time.perf_counter() - start_s, process_age_s()
        requests = make_requests(items, engine.info, config.seed)
        times = _measure(engine, requests, _warm_up(engine, config.seed))
        return _result(arguments["model"], engine.info, requests, times, load_s, ready_s), times.measured


def _ablate(arguments: Mapping[str, Any], items: list[WorkloadItem], base: BenchResult) -> None:
    """Prints the effect of each change. The first row repeats the base, to show the variation between identical
    runs."""
    table = Table("configuration", "output tokens/s", "of the base", "step ms", "host µs per step", "cached tokens")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    given = msgspec.to_builtins(msgspec.convert(arguments, EngineConfig))
    for name, change in {"as given, again": {}, **ABLATIONS}.items():
        if name != "as given, again" and _changes_nothing(given, change):
            continue
        try:
            result, _ = _run({**arguments, **change}, items, as_served=False)
        except ValueError:  # impossible with the other arguments, as speculation in a split model
            if not change:
                raise
            continue
        ratio = result.output_tokens_per_s / base.output_tokens_per_s
        speeds = (f"{result.output_tokens_per_s:,.1f}", f"{ratio:.2f} ×", f"{result.step_ms:.2f}")
        table.add_row(name, *speeds, f"{result.host_us_per_step:.0f}", f"{result.cached_tokens:,}")
    Console().print(table)


def _changes_nothing(given: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
    """Whether the change has no effect: it is set already, so is another speculation, or steps never overlap (CPU)."""
    if "async_scheduling" in change and given["device"] == "cpu" and not given["mock_steps_in_flight"]:
        return True
    if change.get("speculative_config") and given["speculative_config"]:
        return True
    return all(given[field] == value for field, value in change.items())


def read_workload(path: Path) -> list[WorkloadItem]:
    """Raises ValueError that names the invalid item and field."""
    try:
        items = msgspec.json.decode(path.read_bytes(), type=list[WorkloadItem])
    except msgspec.DecodeError as error:
        raise ValueError(f"workload file {path.name}: {error}") from error
    if not items:
        raise ValueError(f"workload file {path.name} is an empty list, expected at least 1 request")
    return items


def make_requests(items: list[WorkloadItem], info: ModelInfo, seed: int) -> list[InferRequest]:
    """Greedy requests that ignore the end of sequence. Random prompts depend only on (seed, position in the file)."""
    requests = []
    for index, item in enumerate(items):
        draw = np.random.default_rng([seed, index])
        prompt = item.prompt_token_ids or tuple(draw.integers(0, info.vocab_size, item.prompt_tokens).tolist())
        sampling = SamplingParams(max_tokens=item.output_tokens, temperature=0.0, ignore_eos=True)
        requests.append(InferRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    return requests


def _warm_up(engine: OfflineEngine, seed: int) -> EngineStats:
    """Returns the engine's counters afterwards."""
    item = WorkloadItem(prompt_tokens=WARM_UP_PROMPT_TOKENS, output_tokens=WARM_UP_OUTPUT_TOKENS)
    *_, last = engine.generate(make_requests([item] * WARM_UP_REQUESTS, engine.info, seed + 1))
    return last.stats


def _measure(engine: OfflineEngine, requests: list[InferRequest], before: EngineStats) -> _Times:
    times = _Times(before)
    gc.collect()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for result in engine.generate(requests):
        now_s = time.perf_counter() - start_s
        for output in result.outputs:
            if output.error:
                raise RuntimeError(f"request {output.request_id} of the workload: {output.error}")
            times.tokens_s.setdefault(output.request_id, []).extend([now_s] * len(output.token_ids))
        times.wall_s = now_s
        times.add_step(result.stats)
    times.cpu_s = time.process_time() - start_cpu_s
    for request in requests:
        expected, got = request.sampling.max_tokens, len(times.tokens_s[request.request_id])
        if got != expected:
            raise RuntimeError(f"request {request.request_id} of the workload gave {got} tokens, expected {expected}")
    return times


def _result(
    model: str, info: ModelInfo, requests: list[InferRequest], times: _Times, load_s: float, ready_s: float
) -> BenchResult:
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = sum(request.sampling.max_tokens for request in requests)
    before, after, steps = times.before, times.after, times.num_steps
    memory_mb = sum(tree_pss_mb().values())
    weights_mb, kv_mb = info.weight_bytes / 1e6, times.peak_blocks * info.block_size * info.kv_bytes_per_token / 1e6
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
        itl_mean_ms=float(np.mean(times.gaps_s or [0.0])) * 1e3,
        peak_rss_mb=peak_rss_mb(),
        pss_mb=memory_mb,
        weights_mb=weights_mb,
        kv_mb=kv_mb,
        other_mb=max(memory_mb - weights_mb - kv_mb, 0.0),
        load_s=load_s,
        ready_s=ready_s,
        cpu_s=time.process_time(),
        cores_used=times.cpu_s / times.wall_s,
        num_steps=steps,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        cached_tokens=after.prefix_cache_hits - before.prefix_cache_hits,
        draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        accepted_draft_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        step_ms=times.step_s / steps * 1e3,
        forward_ms=times.forward_s / steps * 1e3,
        sample_ms=times.sample_s / steps * 1e3,
        host_us_per_step=times.host_s / steps * 1e6,
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
    console.print(f"{title} on {result.model} ({result.dtype}, {result.device})", style="bold", markup=False)
    console.print(table)
    if result.description:
        console.print(result.description, style="dim", markup=False)
