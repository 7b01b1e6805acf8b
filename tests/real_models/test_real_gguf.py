"""Real GGUF files, served as they are: tokens of their weights in float32; of smollm2 tokens of its text, its chats.

Runs where test_real_models.py does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM

from llmbackend.adapter.gguf_models import with_directories
from llmbackend.adapter.text.tokenizer_loading import TokenizerSource
from llmbackend.engine.config import EngineConfig
from tests.gguf.test_tokenizer import strings
from tools.real_models import NAMES

from .test_real_models import FOLDER, IS_HERE, PROMPTS, tokens

NUM_STRINGS = 10_000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not IS_HERE, reason=f"no {NAMES[0]} in LLMBACKEND_REAL_MODELS='{FOLDER}' (make real-models)"),
]
CONVERSATION = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of 12 others?"},
]


@pytest.fixture(scope="module")
def file() -> Path:
    return Path(FOLDER) / f"{NAMES[0]}.gguf"


@pytest.fixture(scope="module")
def directory(file: Path) -> Path:
    return Path(with_directories(EngineConfig(model=str(file))).model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("program", ["native", "modules"])
def test_the_files_weights_give_transformers_tokens(name: str, program: str) -> None:
    """Each token is the likeliest one after those before it: the same as greedy generation, in one pass."""
    file = Path(FOLDER) / f"{name}.gguf"
    directory = Path(with_directories(EngineConfig(model=str(file))).model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    found, _ = tokens(directory, prompts, dtype="float32", enforce_eager=program == "modules")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for prompt, output in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


def test_text_has_the_tokens_of_the_published_tokenizer(directory: Path) -> None:
    """The checkpoint's tokenizer.json is made by transformers of the same file, and forgets that SmolLM2's cuts numbers
    into digits."""
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    published = Tokenizer.from_file(str(Path(FOLDER) / NAMES[0] / "tokenizer.json"))
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in strings(NUM_STRINGS):
        ids = ours.encode(text).ids
        assert ids == published.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == published.decode(ids, skip_special_tokens=False)


def test_chats_are_rendered_as_by_the_checkpoint(directory: Path) -> None:
    sources = (TokenizerSource.of(str(path), "", "") for path in (directory, Path(FOLDER) / NAMES[0]))
    ours, checkpoints = (source.load(trust_remote_code=False, interpreter="") for source in sources)
    assert ours.render_chat(CONVERSATION, None, {}) == checkpoints.render_chat(CONVERSATION, None, {})
