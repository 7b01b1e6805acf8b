"""Times a whole prompt in one step, compared with the processor's peak multiplication rate.

For tuning; the share of the peak includes attention, norms and everything else of a step. The peak is that of the
instructions which multiply the model's weights, issued on registers alone, measured in turns with the prompt:

    taskset -c 0 python -m benchmarks.kernels.prefill --model CHECKPOINT --threads 1 --quantization int8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kernels.choice import choose_library
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams


def seconds_of(run: Callable[[], object], threads: int) -> float:
    """One thread's own time, which other processes on its core do not stretch; several threads' on the clock."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    begin = clock()
    run()
    return clock() - begin


def prompt_operations(model: Path, tokens: int) -> tuple[float, float]:
    """Multiplications and additions of linear layers and of attention; the output head computes one row."""
    config = AutoConfig.from_pretrained(model)
    heads, layers, hidden = config.num_attention_heads, config.num_hidden_layers, config.hidden_size
    dim = getattr(config, "head_dim", None) or hidden // heads
    per_layer = hidden * (2 * heads + 2 * config.num_key_value_heads) * dim + 3 * hidden * config.intermediate_size
    linear = 2.0 * (per_layer * layers * tokens + hidden * config.vocab_size)
    return linear, 4.0 * layers * heads * dim * tokens * (tokens + 1) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of a Llama-like model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", choices=["int8"])
    given = parser.parse_args()
    weights = Type.INT8 if given.quantization else Type[given.dtype.upper()]
    config = EngineConfig(
        model=str(given.model), transport="inline", num_threads=given.threads, dtype=given.dtype,
        quantization=given.quantization, max_num_batched_tokens=given.tokens, enable_prefix_caching=False,
    )  # fmt: skip
    core = EngineCore(config, make_runner(config))
    choice = choose_library(weights)
    assert choice is not None, "no native kernels are built"
    prompts, peaks = [], []
    for round_index in range(given.rounds + 1):
        prompt = tuple((i * 7919 + round_index) % 1000 + 10 for i in range(given.tokens))
        core.add(
            InferRequest(request_id=str(round_index), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))
        )
        prompts.append(seconds_of(core.step, given.threads))
        peaks.append(choice.library.peak_rate(weights))
    linear, attention = prompt_operations(given.model, given.tokens)
    peak, seconds = max(peaks) * given.threads, min(prompts[1:])
    rate = (linear + attention) / seconds
    share = attention / (linear + attention)
    print(choice.report)
    print(f"{given.model.name}, {weights.name}, {given.tokens} tokens, {given.threads} threads")
    print(f"{seconds * 1e3:.0f} ms, {given.tokens / seconds:.0f} tokens/s")
    print(f"{rate / 1e9:.0f} GOP/s, {share:.0%} of them attention: {rate / peak:.1%} of the peak of {peak / 1e9:.0f}")


if __name__ == "__main__":
    main()
