"""Shapes of real models with random weights, and the minimum that a step must read and compute.

For: every part of the accelerator benchmark. Does not know: engines. Invariant: a name always means the same shape; the
minima count each weight once per step and each key and value once per row, and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_PER_NUMBER = 2
"""bfloat16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only model with gated MLPs; fields as in its config."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tied: bool
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def linear_parameters(self) -> int:
        """Weights that every decoded token is multiplied with, the output head included."""
        return self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_NUMBER

    def decode_bytes(self, batch: int, context_tokens: float) -> float:
        """The minimum that a decode step reads: all linear weights, and each row's keys and values."""
        return self.linear_parameters * BYTES_PER_NUMBER + batch * context_tokens * self.kv_bytes_per_token

    def prefill_flops(self, num_prompts: int, prompt_tokens: int) -> float:
        """A multiply-add counts as two. The head runs once per prompt; causal attention computes half of the square."""
        tokens = num_prompts * prompt_tokens
        linear = 2.0 * tokens * self.num_layers * self.layer_parameters
        attention = 2.0 * tokens * prompt_tokens * self.num_layers * self.num_heads * self.head_dim
        return linear + attention + 2.0 * num_prompts * self.vocab_size * self.hidden_size

    def config(self) -> dict[str, Any]:
        """config.json as transformers reads it."""
        architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        return {
            "architectures": [architecture[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "bos_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "dtype": "bfloat16",
            **dict(self.extra),
        }

    def write(self, directory: Path) -> Path:
        """A checkpoint folder without weights: engines draw them."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config(), indent=1))
        return directory


def _rope(theta: float, **more: Any) -> tuple[tuple[str, Any], ...]:
    return (("rope_parameters", {"rope_type": "default", "rope_theta": theta, **more}),)


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, True, _rope(1e6)),
    "qwen3-1.7b": Shape("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 40960, True, _rope(1e6)),
    "llama-3.1-8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, False, _rope(5e5)),
    "tiny": Shape("llama", 512, 64, 128, 2, 4, 2, 32, 512, True, _rope(1e4)),
}
"""`tiny` is for trying the benchmark itself where there is no GPU."""
