"""Compares how we and llama.cpp read a GGUF file: tokens of difficult strings, and logits of the same tokens.

    python -m benchmarks.llama_cpp_agreement FILE.gguf [--scratch FOLDER] [--strings 10000]

For docs/weights.md. Independent of how either computes. Logits of the file's values in float32, computed by us, are
what both are compared with. Strings and text are fixed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from llmbackend.adapter.gguf_models import with_directories
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_runner import NativeRunner
from llmbackend.engine.cpu.recurrent_operations import StepStates
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.step import FlatStep
from tests.gguf.test_tokenizer import strings

from .environments import Environments
from .perplexity import TEXT_PATH
from .suite import environ_of

ROOT = Path(__file__).resolve().parent.parent
TEXTS, TEXT_TOKENS = 8, 64
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Read:
    tokens: list[list[int]]
    """Of the strings."""
    logits: Logits
    """[tokens of the texts, vocab]"""


def config_of(file: Path, **options: Any) -> EngineConfig:
    return with_directories(EngineConfig(model=str(file), transport="inline", **options))


def our_logits(config: EngineConfig, texts: list[list[int]]) -> Logits:
    runner = make_runner(config)
    assert isinstance(runner, NativeRunner)
    found = [_of_text(runner, text, config.block_size) for text in texts]
    runner.close()
    return np.concatenate(found)


def _of_text(runner: NativeRunner, text: list[int], block_size: int) -> Logits:
    """One sequence from its start, sampled behind each of its tokens."""
    places, length = np.arange(len(text), dtype=np.int32), np.array([len(text)], np.int32)
    step = FlatStep(
        rows=np.zeros(1, np.int32), query_lens=length, seq_lens=length, query_start=np.array([0, len(text)], np.int32),
        token_ids=np.array(text, np.int32), positions=places, slots=places, sampled_tokens=places,
    )  # fmt: skip
    blocks = np.arange(-(-len(text) // block_size), dtype=np.int32)[None, None]
    none = np.full(len(text), -1, np.int32)
    states = StepStates(slots=np.zeros(1, np.int32), sources=none[:1], copies=none)
    return runner.program.forward(step, places[None], blocks, states).copy()


def read_by_llama_cpp(environments: Environments, file: Path, questions: dict[str, Any]) -> Read:
    environments.install("llama.cpp")
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(folder) / "logits.npy"
        driver = "benchmarks.drivers.llama_cpp_reading"
        command = [str(environments.python("llama.cpp")), "-m", driver, str(file), str(logits)]
        environ = os.environ | environ_of(environments, "llama.cpp")
        done = subprocess.run(
            command, check=True, input=json.dumps(questions), stdout=subprocess.PIPE, text=True, env=environ
        )
        return Read(json.loads(done.stdout), np.load(logits))


def difference(found: Logits, expected: Logits) -> str:
    """A row of a table: largest, mean, relative RMS, how often the likeliest token is the same."""
    apart = np.abs(found - expected)
    relative = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    same = float((found.argmax(-1) == expected.argmax(-1)).mean())
    return f"{apart.max():.3f} | {apart.mean():.4f} | {100 * relative:.2f} % | {100 * same:.1f} %"


def show_tokens(texts: list[str], ours: list[list[int]], theirs: list[list[int]]) -> None:
    differing = [text for text, mine, other in zip(texts, ours, theirs, strict=True) if mine != other]
    print(f"tokens: {len(texts)} strings, {sum(map(len, ours))} tokens, {len(differing)} strings differ")
    shortest = sorted(differing, key=len)[:10]
    for text in shortest:
        index = texts.index(text)
        print(f"  {text!r}\n    ours      {ours[index]}\n    llama.cpp {theirs[index]}")
    letters = Counter(letter for text in differing for letter in set(text))
    if letters:
        print("  letters of differing strings:", letters.most_common(12))


def show_logits(kept: Logits, exact: Logits, theirs: Logits) -> None:
    print(f"logits: {len(exact)} tokens, {exact.shape[1]} logits each, standard deviation {exact.std():.2f}")
    print("| | largest | mean | relative | same likeliest token |\n|---|---|---|---|---|")
    rows = (
        ("ours, from float32", kept, exact),
        ("llama.cpp, from float32", theirs, exact),
        ("ours, from llama.cpp", kept, theirs),
    )
    for name, found, expected in rows:
        print(f"| {name} | {difference(found, expected)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--strings", type=int, default=10_000)
    arguments = parser.parse_args()
    kept = config_of(arguments.file)
    tokenizer = Tokenizer.from_file(str(Path(kept.model) / "tokenizer.json"))
    texts = strings(arguments.strings)
    ids = tokenizer.encode(TEXT_PATH.read_text(), add_special_tokens=False).ids
    parts = [ids[begin * TEXT_TOKENS :][:TEXT_TOKENS] for begin in range(TEXTS)]
    theirs = read_by_llama_cpp(Environments(arguments.scratch), arguments.file, {"strings": texts, "texts": parts})
    ours = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    show_tokens(texts, ours, theirs.tokens)
    exact = our_logits(config_of(arguments.file, dtype="float32"), parts)
    show_logits(our_logits(kept, parts), exact, theirs.logits)


if __name__ == "__main__":
    main()
