"""A workload file through transformers' own continuous batching, measured as `llmbackend bench` measures ours.

    python benchmarks/transformers_cb.py --model DIR --workload FILE.json --json FILE

For: versus_transformers.py. Does not know: our engine. Invariant: greedy, end of sequence ignored, all requests at
once, every requested token generated; loading and a short warm-up are outside the measured time.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAGE_SIZE, MAX_BATCH_TOKENS, MAX_REQUESTS, SPARE_BLOCKS = 64, 512, 64, 64
WARM_UP = [{"prompt_token_ids": list(range(3, 51)), "output_tokens": 8}] * 8


def run(model: Any, items: list[dict[str, Any]]) -> tuple[float, list[list[float]]]:
    """Wall time, and for each request when its tokens came; seconds since all requests were submitted."""
    blocks = sum(-(-(len(item["prompt_token_ids"]) + item["output_tokens"]) // PAGE_SIZE) for item in items)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=max(SPARE_BLOCKS, blocks + SPARE_BLOCKS),
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=MAX_REQUESTS,
        auto_switch_to_flash=False,
        use_cuda_graph=False,
        default_compile_level=0,
    )
    generation = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
    times: dict[str, list[float]] = {f"r{i}": [] for i in range(len(items))}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=5, warmup=False
    ) as manager:
        while not manager.is_running():
            time.sleep(0.01)
        start = time.perf_counter()
        for i, item in enumerate(items):
            manager.add_request(
                item["prompt_token_ids"], request_id=f"r{i}", max_new_tokens=item["output_tokens"], streaming=True
            )
        _collect(manager, times, start)
        return time.perf_counter() - start, list(times.values())


def _collect(manager: Any, times: dict[str, list[float]], start: float) -> None:
    unfinished = len(times)
    while unfinished:
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise RuntimeError("transformers' batching manager died")
            continue
        if output.error:
            raise RuntimeError(output.error)
        seen = times[output.request_id]
        seen += [time.perf_counter() - start] * (len(output.generated_tokens) - len(seen))
        unfinished -= output.is_finished()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--workload", "--json"):
        parser.add_argument(name, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    items = json.loads(Path(arguments.workload).read_text())
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"
    ).eval()
    load_s = time.perf_counter() - start
    run(model, WARM_UP)
    wall_s, times = run(model, items)
    outputs = sum(item["output_tokens"] for item in items)
    if sum(map(len, times)) != outputs:
        raise RuntimeError(f"{sum(map(len, times))} tokens came, expected {outputs}")
    gaps_ms = [1e3 * (b - a) for request in times for a, b in pairwise(request)] or [0.0]
    first_ms = [1e3 * request[0] for request in times]
    result = {
        "wall_s": wall_s,
        "output_tokens": outputs,
        "output_tokens_per_s": outputs / wall_s,
        "total_tokens_per_s": (outputs + sum(len(item["prompt_token_ids"]) for item in items)) / wall_s,
        "ttft_p50_ms": float(np.percentile(first_ms, 50)),
        "ttft_p99_ms": float(np.percentile(first_ms, 99)),
        "itl_p50_ms": float(np.percentile(gaps_ms, 50)),
        "itl_p99_ms": float(np.percentile(gaps_ms, 99)),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "load_s": load_s,
        "description": f"torch {torch.__version__}, {torch.get_num_threads()} threads, sdpa",
    }
    Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
