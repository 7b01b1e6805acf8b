"""Perplexity of checkpoints as they are served, in each weight type: what rounding costs a real model.

    python -m benchmarks.perplexity CHECKPOINT [CHECKPOINT …]

For: docs/benchmarks.md, and tests that hold int8 to bfloat16. Does not know: how weights are rounded. Invariants: the
text is fixed (texts/operations.md: documentation of this project, which no model has read), and every type predicts the
same tokens behind the same ones; logprobs are those that the API would return.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams
from tools.real_models import NAMES, make

from .report import PERPLEXITY, perplexity_table
from .suite import Results

TEXT_PATH = Path(__file__).parent / "texts" / "operations.md"
NUM_TOKENS = 10_000
WINDOW_TOKENS = 500
WEIGHT_TYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


def windows(checkpoint: Path, num_tokens: int = NUM_TOKENS) -> list[tuple[int, ...]]:
    """The text's first tokens, in parts that are read one by one."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(TEXT_PATH.read_text(), add_special_tokens=False).ids[:num_tokens]
    assert len(ids) == num_tokens, f"the text has {len(ids)} tokens"
    return [tuple(ids[begin : begin + WINDOW_TOKENS]) for begin in range(0, num_tokens, WINDOW_TOKENS)]


def perplexity(checkpoint: Path, texts: list[tuple[int, ...]], **engine_args: Any) -> float:
    """Of all tokens but the first of each text. engine_args: as EngineConfig's."""
    config = EngineConfig(model=str(checkpoint), transport="inline", enable_prefix_caching=False, **engine_args)
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


def measure(checkpoint: Path) -> dict[str, float]:
    texts = windows(checkpoint)
    return {name: perplexity(checkpoint, texts, **arguments) for name, arguments in WEIGHT_TYPES.items()}


def run(results: Results) -> None:
    """Adds a line for each real model, made where `make real-models` makes it."""
    for name in NAMES:
        if not results.has(model=name, workload=PERPLEXITY):
            path = make(name, Path(sys.prefix) / "real_models")
            command = [sys.executable, "-m", "benchmarks.perplexity", "--json", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures = json.loads(done.stdout)
            results.add({"model": name, "workload": PERPLEXITY, "entry": "llmbackend", "round": 0, **figures})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true", help="print the figures of one checkpoint as JSON")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(measure(arguments.checkpoints[0])))
        return
    lines = [{"model": path.name, "workload": PERPLEXITY, **measure(path)} for path in arguments.checkpoints]
    print(perplexity_table(lines))


if __name__ == "__main__":
    main()
