"""The gaps in four streams while a long prompt is computed beside them, with and without a target time for steps.

    python -m benchmarks.long_prompt [--prompt-tokens 8192] [--shape llama-125m-shape] [--dtype bfloat16]

For: step_target_ms's default, and docs/llm_backend.md. Does not know: servers; the engine runs in this process, so that
a gap is the time between two steps. Invariant: both kinds of run compute the same requests, with random weights. On a
busy machine, --cpu-time measures the CPU time of one thread instead of the time that passes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks.checkpoints import SHAPES
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams

NUM_STREAMS = 4
UNDISTURBED_STEPS = 100


def request(name: str, prompt_tokens: int, max_tokens: int) -> InferRequest:
    prompt = tuple((7 * i + len(name)) % 1000 for i in range(prompt_tokens))
    return InferRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        cache_salt=name,
    )


def steps(core: EngineCore, clock_s: Callable[[], float]) -> Iterator[tuple[float, set[str]]]:
    """The time of each step, and the requests that got tokens."""
    last_s = clock_s()
    while core.has_work:
        result = core.step()
        now_s = clock_s()
        yield now_s - last_s, {output.request_id for output in result.outputs if output.token_ids}
        last_s = now_s


def measure(config: EngineConfig, prompt_tokens: int, clock_s: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Gaps in seconds of the streams alone, and from the long prompt's arrival to its first token."""
    core = EngineCore(config, make_runner(config), clock_s)
    assert config.max_model_len is not None
    for i in range(NUM_STREAMS):
        core.add(request(f"stream {i}", 32, config.max_model_len - 32))
    gaps = steps(core, clock_s)
    for _ in range(10):
        next(gaps)
    alone = [next(gaps)[0] for _ in range(UNDISTURBED_STEPS)]
    core.add(request("long", prompt_tokens, 1))
    beside = []
    for gap_s, names in gaps:
        beside.append(gap_s)
        if "long" in names:
            break
    core.close()
    return alone, beside


def milliseconds(gaps_s: list[float]) -> str:
    ordered = sorted(gaps_s)
    p99 = ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]
    return f"{1e3 * statistics.median(ordered):8.1f} {1e3 * p99:8.1f} {1e3 * ordered[-1]:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-125m-shape")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="measure the CPU time of one thread")
    parser.add_argument("--targets-ms", nargs="*", help="default: 0 (none) and null", default=["0", "null"])
    arguments = parser.parse_args()
    clock_s = time.process_time if arguments.cpu_time else time.monotonic
    max_model_len = 2 * arguments.prompt_tokens
    with tempfile.TemporaryDirectory() as directory:
        model_config = SHAPES[arguments.shape]()
        model_config.max_position_embeddings = max_model_len
        model_config.save_pretrained(directory)
        print(f"{arguments.shape}, {NUM_STREAMS} streams, a prompt of {arguments.prompt_tokens} tokens; gaps in ms")
        print("step_target_ms            p50      p99      max   first token in s")
        for target in arguments.targets_ms:
            config = EngineConfig(
                model=directory,
                load_format="dummy",
                dtype=arguments.dtype,
                num_threads=1 if arguments.cpu_time else arguments.threads,
                max_model_len=max_model_len,
                step_target_ms=None if target == "null" else float(target),
            )
            alone, beside = measure(config, arguments.prompt_tokens, clock_s)
            print(f"{target:>8} alone    {milliseconds(alone)}")
            print(f"{target:>8} beside   {milliseconds(beside)} {sum(beside):12.1f}", flush=True)


if __name__ == "__main__":
    main()
