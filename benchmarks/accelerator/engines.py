"""Engines and requests shared by sections of the accelerator benchmark.

Used by the sections that run our engine in their own process. Independent of what they measure. Invariants: random
weights; a prompt's tokens are drawn from a fixed seed; end of sequence is ignored, so that a request gets all of its
tokens or the run fails.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.workloads import Request

from .int4_checkpoint import write_int4
from .section import Section
from .shapes import SHAPES, Shape

if TYPE_CHECKING:
    from llmbackend.engine.config import EngineConfig
    from llmbackend.engine.messages import InferRequest, StepResult
    from llmbackend.engine.offline import OfflineEngine

MAX_MODEL_LEN = 4096
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": 32, "max_model_len": MAX_MODEL_LEN}
SCALE = {name: 16 for name in SHAPES if name.startswith("tiny")}
"""Divisor of the workloads of tiny shapes."""


def engine_config(section: Section, **arguments: Any) -> EngineConfig:
    """The section's options win over `arguments`."""
    return config_of(SHAPES[section.shape], section.scratch / section.shape, section, arguments)


def config_of(shape: Shape, folder: Path, section: Section, arguments: Mapping[str, Any]) -> EngineConfig:
    """Of another shape than the section's; folder: of its checkpoint."""
    from llmbackend.engine.config import EngineConfig

    values: dict[str, Any] = {**ENGINE, **arguments, **section.options}
    if (sizes := values.get("cudagraph_capture_sizes")) is not None:
        values["cudagraph_capture_sizes"] = tuple(sizes)  # JSON's lists
    values["max_model_len"] = min(values["max_model_len"], shape.max_position_embeddings)
    if shape.int4_group:
        write_int4(shape, folder, section.device)
    else:
        values["load_format"] = "dummy"
        shape.write(folder)
    return EngineConfig(model=str(folder), device=section.device, **values)


def requests_of(shape: Shape, lengths: Sequence[tuple[int, int]]) -> list[Request]:
    """lengths: tokens of the prompt and of the output, of each."""
    draw = random.Random(len(lengths))
    return [Request([draw.randrange(3, shape.vocab_size) for _ in range(n)], output) for n, output in lengths]


def infer_request(name: str, prompt: Sequence[int], output_tokens: int, **sampling: Any) -> InferRequest:
    """Greedy unless `sampling` says otherwise."""
    from llmbackend.engine.messages import InferRequest, SamplingParams

    parameters = {"temperature": 0.0, **sampling}
    wanted = SamplingParams(max_tokens=output_tokens, ignore_eos=True, **parameters)
    return InferRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=wanted)


def infer_requests(requests: Sequence[Request]) -> list[InferRequest]:
    """Named by their places."""
    return [infer_request(str(i), request.prompt, request.output_tokens) for i, request in enumerate(requests)]


def steps(engine: OfflineEngine, requests: Sequence[InferRequest]) -> Iterator[StepResult]:
    """Raises RuntimeError when a request ends with an error."""
    for result in engine.generate(requests):
        for output in result.outputs:
            if output.error:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
        yield result


def why_slow(section: Section, engine: OfflineEngine) -> list[str]:
    """Says so if a GPU runs the model as modules: its figures are then not those of the program."""
    if not section.on_gpu or "one program" in engine.info.description:
        return []
    return [f"the model runs as modules: {engine.info.description}"]


@dataclass(frozen=True)
class DecodeRun:
    tokens: dict[str, list[int]]
    """Of each request."""
    max_blocks: int
    """KV blocks held at a time."""
    step_s: float
    """Median from one step in which all requests decode to the next."""


def decode_run(engine: OfflineEngine, requests: Sequence[InferRequest]) -> DecodeRun:
    """Raises RuntimeError when a request ends with an error, or never all of them decode."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    max_blocks, steps_s, before_s = 0, [], 0.0
    for result in steps(engine, requests):
        now_s, all_decode = time.perf_counter(), len(result.outputs) == len(requests)
        if before_s and all_decode:
            steps_s.append(now_s - before_s)
        before_s = now_s if all_decode else 0.0
        max_blocks = max(max_blocks, result.stats.num_blocks - result.stats.num_free_blocks)
        for output in result.outputs:
            tokens[output.request_id] += output.token_ids
    if not steps_s:
        raise RuntimeError(f"{len(requests)} requests never decoded in the same step")
    return DecodeRun(tokens, max_blocks, statistics.median(steps_s))


def generated(engine: OfflineEngine, requests: Sequence[InferRequest]) -> dict[str, list[int]]:
    """Each request's tokens. Raises RuntimeError when any are missing."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for result in steps(engine, requests):
        for output in result.outputs:
            tokens[output.request_id] += output.token_ids
    short = [r.request_id for r in requests if len(tokens[r.request_id]) != r.sampling.max_tokens]
    if short:
        raise RuntimeError(f"{len(short)} of {len(requests)} requests did not get all of their tokens")
    return tokens
