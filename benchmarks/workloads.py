"""The workloads of the comparison, as lists of requests.

Used by every engine's driver, and `llmbackend bench` through `write_workload`. Independent of engines, checkpoints and
any package but the standard library. Invariant: a name always means the same requests, drawn from a fixed seed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

_SEEDS = {
    "W0": 66, "W1": 11, "W2": 22, "W3": 33, "W4": 44, "W5": 55, "W6": 606, "W7": 77, "W8": 88, "W9": 99, "W10": 1010,
}  # fmt: skip
_LOWEST_TOKEN, _HIGHEST_TOKEN = 3, 31990
DESCRIPTIONS = {
    "W1": "64 requests, 32 tokens in, 128 out",
    "W2": "64 requests of mixed lengths, 16 to 512 in, 16 to 128 out",
    "W3": "one request, 128 in, 128 out",
    "W4": "prefill: 16 requests, 1,024 in, 1 out",
    "W5": "64 requests that share their first 512 tokens, 32 more in, 32 out",
    "W6": "long: 4 requests, 8,192 in, 64 out",
    "W7": "very long: one request, 32,704 in, 64 out",
    "W8": "short: 64 requests, 16 tokens in, 32 out",
    "W9": "short prefill: 2 requests, 512 in, 1 out",
    "W10": "prefill: one request, 2,048 in, 1 out",
}
SHORT = frozenset({"W8", "W9", "W10"})
"""For models whose W1 and W4 take many minutes; only if named."""
PREFILL = frozenset({"W4", "W9", "W10"})
LONG = frozenset({"W6", "W7"})
"""Measured apart from the others: an engine may have to be told of a longer context."""
CONTEXT_TOKENS = {"W6": 8_256, "W7": 32_768}
"""What a long one needs; the others need less than every model has."""
SHARED_PREFIX_TOKENS = {"W5": 512}


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    output_tokens: int


def workload(name: str) -> list[Request]:
    """W0 is for warming up."""
    rng = random.Random(_SEEDS[name])

    def tokens(count: int) -> list[int]:
        return [rng.randint(_LOWEST_TOKEN, _HIGHEST_TOKEN) for _ in range(count)]

    match name:
        case "W0":
            return [Request(tokens(48), 8) for _ in range(8)]
        case "W1":
            return [Request(tokens(32), 128) for _ in range(64)]
        case "W2":
            lengths = [(rng.randint(16, 512), rng.randint(16, 128)) for _ in range(64)]
            return [Request(tokens(prompt), output) for prompt, output in lengths]
        case "W3":
            return [Request(tokens(128), 128)]
        case "W4":
            return [Request(tokens(1024), 1) for _ in range(16)]
        case "W6":
            return [Request(tokens(8_192), 64) for _ in range(4)]
        case "W7":
            return [Request(tokens(32_704), 64)]
        case "W8":
            return [Request(tokens(16), 32) for _ in range(64)]
        case "W9":
            return [Request(tokens(512), 1) for _ in range(2)]
        case "W10":
            return [Request(tokens(2_048), 1)]
        case _:
            prefix = tokens(SHARED_PREFIX_TOKENS["W5"])
            return [Request(prefix + tokens(32), 32) for _ in range(64)]


def write_workload(requests: list[Request], path: Path) -> None:
    """Writes a file for `llmbackend bench`."""
    items = [{"prompt_token_ids": request.prompt, "output_tokens": request.output_tokens} for request in requests]
    path.write_text(json.dumps(items))
