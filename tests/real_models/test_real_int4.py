"""Checkpoints in 4 bits that llm-compressor and GPTQModel wrote, of a real model.

Runs where LLMBACKEND_REAL_MODELS names a folder whose `int4` has such checkpoints (tools/int4_checkpoints.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.perplexity import perplexity, windows
from llmbackend.adapter.gguf_models import with_directories
from llmbackend.engine.config import EngineConfig

from .test_real_models import FOLDER, tokens

CHECKPOINTS = sorted(path.parent for path in Path(FOLDER or "/nonexistent").glob("int4/*/reference.json"))
NUM_TOKENS = 2_500

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CHECKPOINTS, reason="LLMBACKEND_REAL_MODELS has no int4 folder (tools/int4_checkpoints.py)"),
]


@pytest.fixture(params=CHECKPOINTS, ids=lambda path: path.name)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def kept(checkpoint: Path) -> dict[str, Any]:
    """The engine arguments that such a checkpoint has where none are given."""
    config = with_directories(EngineConfig(model=str(checkpoint)))
    assert config.quantization == "int4"
    return {"quantization": config.quantization}


def test_its_weights_give_the_tokens_of_its_own_program(checkpoint: Path) -> None:
    """In float32 all of them; with activations in 8 bits most of the first ones."""
    reference = json.loads((checkpoint / "reference.json").read_text())
    prompts, expected = reference["prompts"], reference["tokens"]
    found, _ = tokens(checkpoint, prompts, dtype="float32")
    assert [each[: len(tokens_)] for each, tokens_ in zip(found, expected, strict=True)] == expected
    found, description = tokens(checkpoint, prompts, **kept(checkpoint))
    assert "int4 linear layers, one native program" in description
    assert sum(a[0] == b[0] for a, b in zip(found, expected, strict=True)) > len(prompts) // 2


def test_activations_in_8_bits_cost_little_perplexity(checkpoint: Path) -> None:
    texts = windows(checkpoint, NUM_TOKENS)
    assert perplexity(checkpoint, texts, **kept(checkpoint)) < perplexity(checkpoint, texts, dtype="bfloat16") * 1.02
