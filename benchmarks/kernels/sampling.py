"""The cost of sampling: native against torch, interleaved in one run.

    python -m benchmarks.kernels.sampling [--threads 1] [--repeats 9]

Milliseconds per step (medians), and for the native path the part of it that is Python (the same call on logits of 64
tokens). "flat" logits are normal with deviation 1, "peaked" ones have deviation 3 and some tokens far above.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llmbackend.engine.kernels import library
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.sampling.torch_sampling import TorchSampler
from llmbackend.engine.step import RowTable

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("peaked", {"temperature": 0.0}),
    "temperature": ("peaked", {"temperature": 0.8}),
    "top_k 50": ("peaked", {"temperature": 0.8, "top_k": 50}),
    "top_p 0.9": ("peaked", {"temperature": 0.8, "top_p": 0.9}),
    "top_p 0.9, flat": ("flat", {"temperature": 0.8, "top_p": 0.9}),
    "min_p 0.05": ("peaked", {"temperature": 0.8, "min_p": 0.05}),
    "min_p 0.05, flat": ("flat", {"temperature": 0.8, "min_p": 0.05}),
    "all three": ("peaked", {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05}),
    "greedy, logprobs 5": ("peaked", {"temperature": 0.0, "logprobs": 5}),
    "all three, logprobs 5": ("peaked", {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "logprobs": 5}),
    "top_p 0.9, penalties": ("peaked", {"temperature": 0.8, "top_p": 0.9, **PENALTIES}),
}


def make_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab + 16, generator=generator) * (1.0 if kind == "flat" else 3.0)
    if kind == "peaked":
        logits[:, :2000:100] += torch.linspace(10, 20, 20)
    return logits


def step_of(sampler: TorchSampler, logits: torch.Tensor, sampling: dict[str, Any]) -> Callable[[], object]:
    """One step over all rows of the logits, each with a prompt of 200 tokens and 56 after it."""
    num_rows, table = len(logits), RowTable(len(logits), 256, 16)
    table.token_ids[:] = np.random.default_rng(0).integers(0, 64, table.token_ids.shape)
    table.num_tokens[:], table.num_prompt_tokens[:] = 256, 200
    rows = np.arange(num_rows, dtype=np.int32)
    for row in rows.tolist():
        prompt = tuple(table.token_ids[row, :200].tolist())
        parameters = SamplingParams(seed=row, **sampling)
        sampler.add_row(row, InferRequest(request_id="", prompt_token_ids=prompt, sampling=parameters))
    positions = table.num_tokens[rows]
    return lambda: sampler.sample(rows, positions, logits, table)


def interleaved_ms(steps: list[Callable[[], object]], repeats: int) -> list[float]:
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats + 1):
        for step, taken in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken[1:]) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = library.load()
    if loaded is None:
        raise SystemExit("there are no native kernels here")
    engine = library.NativeKernels(loaded, arguments.threads)
    print(f"{loaded.variant}, {arguments.threads} threads, {arguments.dtype}: ms per step")
    print(f"{'vocab':>7} {'rows':>4} {'':24} {'torch':>8} {'native':>8} {'Python':>8}")
    for vocab in (32_000, 151_936):
        for rows in (1, 64):
            for name, (kind, sampling) in CASES.items():
                logits = make_logits(kind, rows, vocab).to(getattr(torch, arguments.dtype))
                small = TorchSampler(rows, 64, (), engine)
                steps = [
                    step_of(TorchSampler(rows, vocab, ()), logits, sampling),
                    step_of(TorchSampler(rows, vocab, (), engine), logits, sampling),
                    step_of(small, logits[:, :64].contiguous(), sampling),
                ]
                slow, fast, python = interleaved_ms(steps, arguments.repeats)
                print(f"{vocab:7} {rows:4} {name:24} {slow:8.3f} {fast:8.3f} {python:8.3f}", flush=True)


if __name__ == "__main__":
    main()
