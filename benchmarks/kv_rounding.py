"""The cost of 8-bit keys and values for a real model: perplexity with attention rounded in transformers' modules.

    python -m benchmarks.kv_rounding CHECKPOINT

For the decision in docs/engine.md. Independent of kernels. Invariant: text and tokens are those of perplexity.py, and
everything that is not rounded is computed in float32.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .perplexity import windows

ROUNDED = ((), ("key",), ("value",), ("key", "value"), ("query", "key", "value", "weights"))
"""What is rounded: query, key and value to int8 with one scale for each token and head, weights to 8 unsigned bits."""


class RoundedAttention:
    def __init__(self) -> None:
        self.rounded: tuple[str, ...] = ()

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """query, key, value: [1, heads, tokens, head size]; causal. Returns [1, tokens, heads, head size]."""
        query, key, value = (
            _in_int8(x) if name in self.rounded else x for name, x in (("query", query), ("key", key), ("value", value))
        )
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(-1, -2) * options["scaling"]
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        if "weights" in self.rounded:
            weights = (weights * 255).round() / 255
        return (weights @ value / weights.sum(-1, keepdim=True)).transpose(1, 2).contiguous(), None


def _in_int8(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-20)
    return (x / scale).round() * scale


def perplexity(model: Any, texts: list[tuple[int, ...]]) -> float:
    """Of all tokens but the first of each text."""
    logprobs = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([text])
            logits = model(ids).logits[0, :-1].log_softmax(-1)
            logprobs.append(logits.gather(1, ids[0, 1:, None]))
    return math.exp(-torch.cat(logprobs).mean().item())


def main(checkpoint: Path) -> None:
    attention = RoundedAttention()
    ALL_ATTENTION_FUNCTIONS.register("rounded", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", lambda *_, **__: None)
    model = tf.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="rounded")
    texts = windows(checkpoint)
    for attention.rounded in ROUNDED:
        print(f"{', '.join(attention.rounded) or 'nothing'} rounded: {perplexity(model, texts):.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
