"""Sampling at a real vocabulary: the tokens of the CPU's sampler, and the time of a step by the rows' sampling
parameters.

    python -m benchmarks.accelerator.sampling_steps --shape qwen2.5-0.5b --device cuda --json FILE --scratch FOLDER

For gpu/kernels/sampling.py, narrowing.py, ranked_sampling.py; the tests of narrowing run in the interpreter alone.
Independent of models. Invariants: both flat rows, whose limits end far down the order, and rows with the usual spread;
few draws may differ from the CPU's, those on a border between two tokens (see DeviceSampler); times are those of a
replayed graph, and of the host's part alone.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

from .section import Section, run_alone, seconds_in_graph
from .shapes import SHAPES

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "top_k, top_p": {"temperature": 0.8, "top_k": 2000, "top_p": 0.95},
    "min_p": {"temperature": 0.8, "min_p": 0.02},
    "penalties, top_p": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
SPREADS = {"flat": 0.01, "usual": 3.0}
"""Standard deviation of logits."""
CHECKED_ROWS, TIMED_ROWS = 32, (1, 64, 256)
FEW = 1
"""Rows where there is no GPU."""
MAX_DIFFERENT = 0.1
"""Share of rows. Of 150,000 flat tokens one draw in some hundred falls on a border."""
NUM_PROMPT, NUM_TOKENS = 5, 30
HOST_CALLS = 20


def measure(section: Section) -> None:
    wrong, spreads = [], SPREADS if section.on_gpu else ("usual",)
    for way, spread in product(WAYS if section.on_gpu else ("temperature",), spreads):
        count = CHECKED_ROWS if section.on_gpu else FEW
        line = _checked(_Rows(section, way, spread, count))
        section.add(measure="sampled", case=f"{way}, {spread}", rows=count, **line)
        wrong += [f"{way}, {spread}: {line['wrong']}"] if line["wrong"] else []
    for way, spread in product(WAYS if section.on_gpu else ("temperature",), spreads):
        for count in TIMED_ROWS if section.on_gpu else (FEW,):
            line = _timed(_Rows(section, way, spread, count))
            section.add(measure="sampling time", case=f"{way}, {spread}", rows=count, **line)
    section.fail(wrong)


class _Rows:
    """Rows that all ask for the same, with the device's sampler and its arguments."""

    def __init__(self, section: Section, way: str, spread: str, count: int) -> None:
        import torch

        from llmbackend.engine.gpu.device_sampler import DeviceSampler
        from llmbackend.engine.messages import InferRequest, SamplingParams
        from llmbackend.engine.step import RowTable

        self.count, self.vocab_size = count, SHAPES[section.shape].vocab_size
        self.device = torch.device(section.device)
        random = torch.Generator(self.device).manual_seed(count)
        normal = torch.randn(count, self.vocab_size, generator=random, device=self.device)
        self.logits = (normal * SPREADS[spread]).bfloat16()
        self.table = RowTable(count, NUM_TOKENS + 2, 16)
        tokens = torch.randint(self.vocab_size, self.table.token_ids.shape, generator=torch.Generator().manual_seed(1))
        self.table.token_ids[:] = tokens.numpy()
        self.table.num_prompt_tokens[:], self.table.num_tokens[:] = NUM_PROMPT, NUM_TOKENS
        self.requests = [
            InferRequest(
                request_id=str(row),
                prompt_token_ids=tuple(self.table.token_ids[row, :NUM_PROMPT].tolist()),
                sampling=SamplingParams(seed=row, **WAYS[way]),
            )
            for row in range(count)
        ]
        self.sampler = DeviceSampler(count, self.vocab_size, (2,), self.device)
        for row, request in enumerate(self.requests):
            self.sampler.add_row(row, request)
        arrays = range(count), self.table.num_tokens, self.table.token_ids, self.table.num_prompt_tokens
        self.arguments = [torch.tensor(array, dtype=torch.int32, device=self.device) for array in arrays]

    def sample(self) -> list[Any]:
        prepared = self.sampler.prepare()
        prepared.complete()
        return prepared.sample(self.logits, *self.arguments)

    def expected(self) -> list[int]:
        """Of the CPU's sampler."""
        import numpy as np

        from llmbackend.engine.sampling.torch_sampling import TorchSampler

        reference = TorchSampler(self.count, self.vocab_size, (2,))
        for row, request in enumerate(self.requests):
            reference.add_row(row, request)
        rows = np.arange(self.count, dtype=np.int32)
        sampled = reference.sample(rows, self.table.num_tokens, self.logits.cpu(), self.table, None)
        return [int(token) for token in sampled.token_ids]


def _checked(rows: _Rows) -> dict[str, Any]:
    try:
        found = rows.sample()[0].tolist()
        again = rows.sample()[0].tolist()
        num_other = sum(ours != theirs for ours, theirs in zip(found, rows.expected(), strict=True))
    except Exception as failure:  # of a kernel that does not compile or does not run
        return {"wrong": f"{type(failure).__name__}: {failure}"[:300]}
    wrong = "not the same again" if again != found else ""
    if num_other > MAX_DIFFERENT * rows.count:
        wrong = wrong or f"{num_other} of {rows.count} tokens are not the CPU's"
    return {"other_tokens": num_other, "wrong": wrong}


def _timed(rows: _Rows) -> dict[str, float]:
    import torch

    call_s = seconds_in_graph([rows.sample] * 2, rows.device)
    if rows.device.type == "cuda":
        torch.cuda.synchronize()
    num_calls, start_s = HOST_CALLS if rows.device.type == "cuda" else 1, time.perf_counter()
    for _ in range(num_calls):
        rows.sample()
    return {"call_s": call_s, "host_s": (time.perf_counter() - start_s) / num_calls}


if __name__ == "__main__":
    run_alone("sampling_steps", measure)
