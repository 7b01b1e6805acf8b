"""A model with a sliding window: freed KV blocks change no token, and what the window saves.

    python -m benchmarks.accelerator.windows --shape mistral-7b-v0.1-4-layers --device cuda --json FILE --scratch FOLDER

For blocks behind a window (engine/scheduling), and attention that begins within a block. Independent of when blocks are
freed. Invariants: texts several times as long as the window; the engine that keeps its blocks is the same but for that;
with `batch_invariant` every token must be equal, and fewer blocks must have been in use, otherwise nothing was tested.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .engines import DecodeRun, config_of, decode_run, infer_request, requests_of
from .section import Section, run_alone
from .shapes import SHAPES

PROMPTS, OUTPUT_TOKENS, MAX_MODEL_LEN = (13000, 9000, 5000, 300), 64, 16384
BLOCKS = 1024
"""Of 32 tokens: more than all hold without a window. Several engines come one after the other in one process."""
SCALE = 60
"""Divisor of the prompts where there is no GPU."""


def measure(section: Section) -> None:
    given_back, knows_window = _run(section, "blocks given back")
    kept, _ = _run(section, "blocks kept", keeps=True)
    if section.on_gpu:
        _run(section, "no window", window=0)
    wrong = [f"request {name} got other tokens" for name in kept.tokens if given_back.tokens[name] != kept.tokens[name]]
    section.add(measure="equality", case="blocks given back", requests=len(kept.tokens), different=len(wrong))
    if section.on_gpu and not knows_window:
        wrong.append("the engine knows of no window")
    if knows_window and given_back.max_blocks >= kept.max_blocks:
        wrong.append(f"{given_back.max_blocks} blocks were held, as many as without a window: nothing was tried")
    section.fail(wrong)


def _run(section: Section, case: str, keeps: bool = False, window: int | None = None) -> tuple[DecodeRun, bool]:
    """And whether the engine gives blocks back."""
    from llmbackend.engine.make_runner import make_runner
    from llmbackend.engine.offline import OfflineEngine

    limits: dict[str, Any] = {"max_num_seqs": len(PROMPTS), "enable_prefix_caching": False}
    limits |= {"max_num_batched_tokens": 2048, "max_model_len": MAX_MODEL_LEN, "batch_invariant": True}
    limits |= {"num_kv_blocks": BLOCKS, "cudagraph_capture_sizes": (len(PROMPTS),)}
    if not section.on_gpu:
        limits |= {"max_num_batched_tokens": 48, "batch_invariant": False, "step_target_ms": 0}
    own = SHAPES[section.shape]
    shape = own if window is None else replace(own, window=window)
    config = config_of(shape, section.scratch / f"{section.shape} {shape.window}", section, limits)
    with OfflineEngine(config, _keeping if keeps else make_runner) as engine:
        run, knows_window = decode_run(engine, _requests(section)), engine.info.kv_groups.num_windowed > 0
    section.add(measure="window", case=case, blocks=float(run.max_blocks), step_s=run.step_s)
    return run, knows_window


def _keeping(config: Any) -> Any:
    """A runner by whose word an engine does not hear of the window, which attention has."""
    import msgspec

    from llmbackend.engine.kv_groups import KVGroups
    from llmbackend.engine.make_runner import make_runner

    runner: Any = make_runner(config)
    runner._info = msgspec.structs.replace(runner.info, kv_groups=KVGroups())
    return runner


def _requests(section: Section) -> list[Any]:
    scale, output = (1, OUTPUT_TOKENS) if section.on_gpu else (SCALE, OUTPUT_TOKENS // 2)
    lengths = [(prompt // scale, output) for prompt in PROMPTS]
    return [
        infer_request(str(i), request.prompt, request.output_tokens)
        for i, request in enumerate(requests_of(SHAPES[section.shape], lengths))
    ]


if __name__ == "__main__":
    run_alone("windows", measure)
