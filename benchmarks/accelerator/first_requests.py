"""How long the first request of each kind takes compared with the second, and what is compiled meanwhile.

    python -m benchmarks.accelerator.first_requests --shape qwen2.5-0.5b --device cuda --json FILE --scratch FOLDER

Checks the rule that no request waits for a compiler. Independent of why a kernel was not compiled at start. Invariants:
Triton's cache on disk is empty at start, as on a new machine; every kernel that is compiled after the engine is ready
is named in the results, and fails the section.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .engines import engine_config, generated, infer_request, requests_of
from .section import Section, run_alone
from .shapes import SHAPES

PROMPT_TOKENS, OUTPUT_TOKENS = 100, 8
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top_p": {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    "top_k, min_p": {"temperature": 0.8, "seed": 1, "top_k": 40, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {5: 2.0}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (3,)},
    "logprobs": {"logprobs": 5},
}


def measure(section: Section) -> None:
    from llmbackend.engine.make_runner import make_runner
    from llmbackend.engine.offline import OfflineEngine

    os.environ["TRITON_CACHE_DIR"] = str(section.scratch / "empty-triton-cache")
    wrong = []
    with _compiled() as compiled, OfflineEngine(engine_config(section), make_runner) as engine:
        section.add(measure="start", load_s=engine.info.load_s, ready_s=engine.info.load_s, kernels=len(compiled))
        prompt = requests_of(SHAPES[section.shape], [(PROMPT_TOKENS, OUTPUT_TOKENS)])[0].prompt
        for kind, sampling in KINDS.items():
            before = len(compiled)
            first_s, second_s = (_seconds(engine, prompt, sampling) for _ in range(2))
            late = sorted(set(compiled[before:]))
            section.add(measure="first request", case=kind, first_s=first_s, second_s=second_s, compiled=late)
            wrong += [f"{kind}: {name} was compiled after the start" for name in late]
    section.fail(wrong)


def _seconds(engine: Any, prompt: list[int], sampling: dict[str, Any]) -> float:
    start_s = time.perf_counter()
    generated(engine, [infer_request("0", prompt, OUTPUT_TOKENS, **sampling)])
    return time.perf_counter() - start_s


@contextmanager
def _compiled() -> Iterator[list[str]]:
    """Names of kernels that Triton compiles from here on."""
    from triton import knobs

    names: list[str] = []

    def note(*_: Any, **given: Any) -> None:
        names.append(str(getattr(given.get("fn"), "name", given.get("repr", ""))))

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = None


if __name__ == "__main__":
    run_alone("first_requests", measure)
