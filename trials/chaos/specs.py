"""The streams' requests, generated from a seed.

Used by every round of chaos, soak and overload. Independent of how a protocol carries a request and of what is
returned. Invariant: the same seed gives the same requests, and every request specifies its sampling seed, so that its
answer is deterministic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Protocol = Literal[
    "generate", "grpc", "chat", "completions", "agent", "responses", "messages", "background", "resumed_generate",
    "resumed_grpc", "resumed_agent",
]  # fmt: skip
PROTOCOLS: tuple[Protocol, ...] = ("generate", "grpc", "chat", "completions")

POISON = "~"
"""A character that no ordinary prompt holds; for the mock model a character is a token."""
_WORDS = ("count", "from", "three", "Triton", "serves", "streams", "é", "名", "blocks", "tokens", "never", "lost")


@dataclass(frozen=True)
class StreamSpec:
    """One request. `sampling_json` holds vLLM's sampling parameters, of an agent's request the whole body; logprobs
    None = not asked for; streams False = one whole answer; key: its `Idempotency-Key`, which is not part of what is
    asked."""

    index: int
    protocol: Protocol
    model: str
    prompt: str
    sampling_json: str
    streams: bool
    logprobs: int | None
    key: str = field(default="", compare=False)

    @property
    def sampling(self) -> dict[str, Any]:
        sampling: dict[str, Any] = json.loads(self.sampling_json)
        return sampling


@dataclass(frozen=True)
class Lengths:
    """Ranges of one set of requests: words of the prompt, tokens of the answer."""

    prompt_words: tuple[int, int] = (1, 24)
    output_tokens: tuple[int, int] = (40, 200)


def make_specs(seed: int, count: int, model: str, lengths: Lengths = Lengths()) -> list[StreamSpec]:
    """Mixed requests: protocols in turn, greedy and seeded, one in five not streamed."""
    rng = random.Random(seed)
    return [_spec(rng, index, model, lengths) for index in range(count)]


def resumed(specs: Iterable[StreamSpec]) -> list[StreamSpec]:
    """The streams among them that a client may come back to, with connections that break."""
    ways: dict[Protocol, Protocol] = {
        "generate": "resumed_generate",
        "grpc": "resumed_grpc",
        "agent": "resumed_agent",
    }
    return [
        StreamSpec(**(vars(spec) | {"index": spec.index + 300_000, "protocol": ways[spec.protocol]}))
        for spec in specs
        if spec.protocol in ways and spec.streams
    ]


def poisoned(spec: StreamSpec) -> StreamSpec:
    return StreamSpec(**(vars(spec) | {"index": spec.index + 100_000, "prompt": f"{spec.prompt} {POISON}"}))


def _spec(rng: random.Random, index: int, model: str, lengths: Lengths) -> StreamSpec:
    prompt = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(*lengths.prompt_words)))
    return StreamSpec(
        index=index,
        protocol=PROTOCOLS[index % len(PROTOCOLS)],
        model=model,
        prompt=f"{prompt} {index}",
        sampling_json=json.dumps(_sampling(rng, index, lengths)),
        streams=index % 5 != 4,
        logprobs=rng.choice([None, None, 0, 3]),
    )


def _sampling(rng: random.Random, index: int, lengths: Lengths) -> dict[str, Any]:
    """Greedy and seeded by turns (not in step with the protocols), and on some: penalties, stop strings, a bias."""
    sampling: dict[str, Any] = {"max_tokens": rng.randint(*lengths.output_tokens), "ignore_eos": rng.random() < 0.8}
    if (index // len(PROTOCOLS)) % 2:
        sampling["temperature"] = 0.0
    else:
        sampling |= {"temperature": rng.choice([0.7, 1.0, 1.3]), "top_p": rng.choice([0.8, 1.0]), "seed": index + 1}
        sampling |= rng.choice([{}, {"top_k": 20}, {"min_p": 0.02}])
    sampling |= rng.choice([{}, {}, {"presence_penalty": 0.5, "frequency_penalty": 0.4}, {"repetition_penalty": 1.2}])
    sampling |= rng.choice([{}, {}, {"stop": ["q.", "zz", "xy"]}, {"min_tokens": 12}, {"logit_bias": {"69": 2.0}}])
    return sampling
