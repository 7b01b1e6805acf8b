"""The servers' requests: texts of chat-like lengths, by `vllm bench serve`, at fixed rates and numbers of streams.

Used by the campaign. Independent of servers. Invariants: a load's requests follow from its name and the round; prompts
share no prefixes, unless that is the load's purpose.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environments import Environments
from ..suite import environ_of, run_process
from .contenders import SERVED_NAME

TEXT = Path(__file__).parent.parent / "texts" / "operations.md"
TOKENS_PER_WORD = 1.5
PROMPT_TOKENS, OUTPUT_TOKENS = 69.5, 214.5
"""Means of LMSYS-Chat-1M (arXiv 2309.11998, table 1)."""
SPREAD = 0.6
"""Of the logarithm of a length: ours, since the paper gives means only."""
FEWEST_OUTPUT_TOKENS, MOST_PROMPT_TOKENS, MOST_OUTPUT_TOKENS = 16, 256, 600
WARM_UPS = 4


@dataclass(frozen=True)
class Load:
    """requests: for a model that is fast; half of them for others. streams: at most so many at once; 0 = any. rate:
    requests per second, with random times between them; inf = at once. prefix_tokens: that all prompts share.
    output_tokens: 0 = as in chats."""

    name: str
    requests: int
    streams: int = 0
    rate: float = math.inf
    prefix_tokens: int = 0
    prompt_tokens: float = PROMPT_TOKENS
    output_tokens: float = OUTPUT_TOKENS


LOADS = (
    Load("1 stream", 8, streams=1),
    Load("8 streams", 32, streams=8),
    Load("64 streams", 64, streams=64),
    Load("1 request/s", 30, rate=1.0),
    Load("2 requests/s", 60, rate=2.0),
    Load("64 streams, shared 512 tokens", 128, streams=64, prefix_tokens=512, output_tokens=32),
    Load("8 streams, prompts of 768 tokens", 16, streams=8, prompt_tokens=768, output_tokens=32),
)


def requests_of(load: Load, count: int, round_number: int) -> list[dict[str, Any]]:
    """Prompts and their numbers of tokens, as `vllm bench serve` reads them."""
    rng = random.Random(f"{load.name} {round_number}")
    words = TEXT.read_text().split()
    prefix = _words(rng, words, load.prefix_tokens)
    is_chat = load.prompt_tokens == PROMPT_TOKENS
    requests = []
    for _ in range(count):
        prompt_tokens = min(_length(rng, load.prompt_tokens), MOST_PROMPT_TOKENS) if is_chat else load.prompt_tokens
        output_tokens = load.output_tokens
        if output_tokens == OUTPUT_TOKENS:
            output_tokens = min(max(_length(rng, output_tokens), FEWEST_OUTPUT_TOKENS), MOST_OUTPUT_TOKENS)
        prompt = f"{prefix} {_words(rng, words, prompt_tokens)}".strip()
        requests.append({"prompt": prompt, "output_tokens": int(output_tokens)})
    return requests


def _length(rng: random.Random, mean: float) -> float:
    """Log-normal, as lengths of chats are."""
    return rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)


def _words(rng: random.Random, words: list[str], tokens: float) -> str:
    count = max(round(tokens / TOKENS_PER_WORD), 1)
    begin = rng.randrange(len(words) - count)
    return " ".join(words[begin : begin + count]) if tokens else ""


def measure(
    environments: Environments, load: Load, count: int, round_number: int, url: str, tokenizer: Path, timeout_s: float
) -> dict[str, Any]:
    """The load generator's figures. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as directory:
        dataset = Path(directory) / "requests.jsonl"
        dataset.write_text("".join(json.dumps(one) + "\n" for one in requests_of(load, count, round_number)))
        command = [str(environments.folder("vllm") / "bin" / "vllm"), "bench", "serve", "--backend", "openai"]
        command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", SERVED_NAME]
        command += ["--tokenizer", str(tokenizer), "--dataset-name", "custom", "--dataset-path", str(dataset)]
        # Of a chat it would take the event with the role for the first token.
        command += ["--custom-output-len", "-1", "--disable-shuffle", "--skip-chat-template", "--ignore-eos"]
        command += ["--temperature", "0", "--num-prompts", str(count), "--num-warmups", str(WARM_UPS)]
        command += ["--max-concurrency", str(load.streams)] if load.streams else ["--request-rate", str(load.rate)]
        # llama.cpp's server closes idle connections while clients use them: a new connection for each request.
        command += ["--header", "Connection=close", "--disable-tqdm", "--metric-percentiles", "50,99", "--save-result"]
        command += ["--percentile-metrics", "ttft,tpot,itl", "--result-dir", directory, "--result-filename", "result"]
        before_s = _children_cpu_s()
        environ = os.environ | environ_of(environments, "ours")
        if error := run_process(command, environ, environments.logs / "load.log", timeout_s):
            raise RuntimeError(error)
        found = json.loads((Path(directory) / "result").read_text())
    return _figures(found, count) | {"generator_cpu_s": round(_children_cpu_s() - before_s, 1)}


def _figures(found: Mapping[str, Any], count: int) -> dict[str, Any]:
    names = {
        "ttft_p50_ms": "median_ttft_ms",
        "ttft_p99_ms": "p99_ttft_ms",
        "itl_p50_ms": "median_itl_ms",
        "itl_p99_ms": "p99_itl_ms",
        "tpot_p50_ms": "median_tpot_ms",
        "output_tokens_per_s": "output_throughput",
        "wall_s": "duration",
    }
    figures = {name: round(found[theirs], 2) for name, theirs in names.items()}
    tokens = {"prompt_tokens": found["total_input_tokens"], "output_tokens": found["total_output_tokens"]}
    return figures | tokens | {"requests": count, "errors": count - found["completed"]}


def _children_cpu_s() -> float:
    """Of processes that have ended and were waited for; a server that still runs is not among them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
