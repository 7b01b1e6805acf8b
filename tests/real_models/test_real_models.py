"""A real model in every weight type, program and protocol. Random weights have neither outliers nor anything to say.

Runs where LLMBACKEND_REAL_MODELS names a folder that tools/real_models.py has filled (`make real-models`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.perplexity import perplexity, windows
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams
from tests.helpers.server_process import ServerProcess, start_server, stop_server
from tools.real_models import NAMES

from .protocols import answers

FOLDER = os.environ.get("LLMBACKEND_REAL_MODELS", "")
IS_HERE = bool(FOLDER) and (Path(FOLDER) / NAMES[0]).is_dir()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not IS_HERE, reason=f"no {NAMES[0]} in LLMBACKEND_REAL_MODELS='{FOLDER}' (make real-models)"),
]
TYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 from bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 from float32": {"dtype": "float32", "quantization": "int8"},
    "int4 from bfloat16": {"dtype": "bfloat16", "quantization": "int4"},
}
PROMPTS = (
    "The history of the Roman Empire begins",
    "def fibonacci(n):\n",
    "Photosynthesis is",
    "Q: What is the largest planet?\nA:",
    "Once upon a time there was a small dragon who",
)
NUM_TOKENS = 40
PERPLEXITY_LIMITS = {"smollm2": (1.01, 1.02), "gemma3-270m": (1.02, 1.15)}
"""With int8 and int4 weights, relative to bfloat16."""


@pytest.fixture(params=NAMES)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return Path(FOLDER) / str(request.param)


@functools.cache
def tokens_by_transformers(checkpoint: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts' tokens, and those that follow them in float32."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(output[0, len(prompt) :].tolist())
    return prompts, found


def tokens(checkpoint: Path, prompts: list[list[int]], **engine_args: Any) -> tuple[list[list[int]], str]:
    """Greedy tokens of all prompts at once, and how the engine describes what computes them."""
    config = EngineConfig(model=str(checkpoint), transport="inline", **engine_args)
    core = EngineCore(config, make_runner(config))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    for place, prompt in enumerate(prompts):
        core.add(InferRequest(request_id=str(place), prompt_token_ids=tuple(prompt), sampling=sampling))
    found: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for output in core.step().outputs:
            assert not output.error
            found[int(output.request_id)] += output.token_ids
    core.close()
    return found, core.info.description


@pytest.mark.parametrize("program", ["native", "modules"])
@pytest.mark.parametrize("weights", TYPES)
def test_every_weight_type_answers_as_transformers(checkpoint: Path, weights: str, program: str) -> None:
    prompts, expected = tokens_by_transformers(checkpoint)
    found, description = tokens(checkpoint, prompts, enforce_eager=program == "modules", **TYPES[weights])
    assert ("modules" in description) == (program == "modules")
    if weights == "float32":
        assert found == expected
    else:  # rounding decides between words that are about as likely, and the rest follows from the first such word
        assert sum(a[0] == b[0] for a, b in zip(found, expected, strict=True)) > len(PROMPTS) // 2


def test_rounding_costs_little_perplexity(checkpoint: Path) -> None:
    """The weights of smollm2 came in 4 bits with minima, so int4 costs it no more than int8."""
    int8_limit, int4_limit = PERPLEXITY_LIMITS[checkpoint.name]
    texts = windows(checkpoint)
    bfloat16, *rounded = (
        perplexity(checkpoint, texts, dtype="bfloat16", quantization=kind) for kind in (None, "int8", "int4")
    )
    assert rounded[0] < bfloat16 * int8_limit
    assert rounded[1] < bfloat16 * int4_limit


@pytest.fixture(scope="module", params=TYPES)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    options = [f"--{name}={value}" for name, value in TYPES[request.param].items()]
    server = start_server("--model", str(Path(FOLDER) / NAMES[0]), "--served-model-name", "real", *options)
    yield server
    stop_server(server)


def test_every_protocol_gives_the_same_answer(server: ServerProcess) -> None:
    found = answers(server, "real")
    assert set(found.values()) == {found["chat"]}, found
    assert "Tokyo" in found["chat"]
