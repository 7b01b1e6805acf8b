"""Perplexity of a checkpoint as served, in each weight type, and of GGUF files: the cost of rounding for a real model.

    python -m benchmarks.perplexity CHECKPOINT [FILE.gguf …]

For docs/benchmarks.md, docs/benchmarks_int4.md, and tests that compare int8 with bfloat16. Independent of how weights
are rounded. Invariants: the text is fixed (texts/operations.md: documentation of this project, which no model has
read), and every type, file and engine predicts the same tokens after the same ones; logprobs are those that the API
would return.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmbackend.adapter.gguf_models import with_directories
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams
from tools.real_models import NAMES

from .environments import Environments
from .models import Models
from .report import FILE_PERPLEXITY, PERPLEXITY, perplexity_table
from .suite import Results, environ_of

TEXT_PATH = Path(__file__).parent / "texts" / "operations.md"
NUM_TOKENS = 10_000
WINDOW_TOKENS = 500
WEIGHT_TYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
FILES = {"smollm2": ("f16", "q4_1", "q4_0", "q4_k_m"), "gemma3-270m": ("q4_k_m",)}
"""Kinds of GGUF files that are read by llama.cpp, too."""


def windows(checkpoint: Path, num_tokens: int = NUM_TOKENS) -> list[tuple[int, ...]]:
    """The text's first tokens, in parts that are read one by one, each after the token that begins a text, if any."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(TEXT_PATH.read_text(), add_special_tokens=False).ids[:num_tokens]
    assert len(ids) == num_tokens, f"the text has {len(ids)} tokens"
    bos = tokenizer.encode("").ids
    return [(*bos, *ids[begin : begin + WINDOW_TOKENS]) for begin in range(0, num_tokens, WINDOW_TOKENS)]


def perplexity(checkpoint: Path, texts: list[tuple[int, ...]], **engine_args: Any) -> float:
    """Of all tokens but the first of each text; of a checkpoint or a GGUF file. engine_args: as EngineConfig's."""
    arguments = {"transport": "inline", "enable_prefix_caching": False, **engine_args}
    config = with_directories(EngineConfig(model=str(checkpoint), **arguments))
    core = EngineCore(config, make_runner(config))
    logprobs = [logprob for text in texts for logprob in _logprobs(core, text)]
    core.close()
    return math.exp(-sum(logprobs) / len(logprobs))


def _logprobs(core: EngineCore, text: tuple[int, ...]) -> Iterator[float]:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    core.add(InferRequest(request_id="text", prompt_token_ids=text, sampling=sampling))
    while core.has_work:
        for output in core.step().outputs:
            assert not output.error, output.error
            yield from (entry.logprob for entry in output.prompt_logprobs)


def measure(checkpoint: Path, files: list[Path]) -> dict[str, float]:
    """Of the checkpoint in each weight type, or of files alone, by their names."""
    texts = windows(checkpoint)
    if files:
        return {file.name: perplexity(file, texts) for file in files}
    return {name: perplexity(checkpoint, texts, **arguments) for name, arguments in WEIGHT_TYPES.items()}


def run(environments: Environments, results: Results) -> None:
    """Adds a line for each real model."""
    for name in NAMES:
        if not results.has(model=name, workload=PERPLEXITY):
            figures = _by_ours(Models(environments).path(name), [])
            results.add({"model": name, "workload": PERPLEXITY, "entry": "llmbackend", "round": 0, **figures})


def run_files(environments: Environments, results: Results) -> None:
    """Adds two lines for each real model: of its files as we read them, and as llama.cpp does."""
    environments.install("llama.cpp")
    models = Models(environments)
    for name in NAMES:
        files = {kind: models.path(f"{name}-{kind}.gguf") for kind in FILES[name]}
        for entry, read in (("llmbackend", _by_ours), ("llama.cpp", functools.partial(_by_llama_cpp, environments))):
            if not results.has(model=name, workload=FILE_PERPLEXITY, entry=entry):
                figures = read(models.path(name), list(files.values()))
                by_kind = {kind: figures[file.name] for kind, file in files.items()}
                results.add({"model": name, "workload": FILE_PERPLEXITY, "entry": entry, "round": 0, **by_kind})


def _by_ours(checkpoint: Path, files: list[Path]) -> dict[str, float]:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.perplexity", "--json", checkpoint, *files]
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _by_llama_cpp(environments: Environments, checkpoint: Path, files: list[Path]) -> dict[str, float]:
    command = [environments.python("llama.cpp"), "-m", "benchmarks.drivers.llama_cpp_perplexity", *files]
    environ = os.environ | environ_of(environments, "llama.cpp")
    texts = json.dumps(windows(checkpoint))
    words = [str(word) for word in command]
    done = subprocess.run(words, check=True, input=texts, stdout=subprocess.PIPE, text=True, env=environ)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("files", type=Path, nargs="*", help="measured in place of the checkpoint, with its tokens")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.checkpoint, arguments.files)
    if arguments.json:
        print(json.dumps(figures))
    elif arguments.files:
        print("\n".join(f"{name}: {value:.3f}" for name, value in figures.items()))
    else:
        print(perplexity_table([{"model": arguments.checkpoint.name, "workload": PERPLEXITY, **figures}]))


if __name__ == "__main__":
    main()
