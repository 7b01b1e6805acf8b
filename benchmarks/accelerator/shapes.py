"""Shapes of real models with random weights, and the minimum that a step must read and compute.

Used by every part of the accelerator benchmark. Independent of engines. Invariant: a name always means the same shape;
the minima count each weight once per step and each key and value once per row, and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_PER_NUMBER = 2
"""bfloat16."""


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's experts; size: of each one's inner width."""

    count: int
    top_k: int
    size: int

    def expected(self, tokens: int) -> float:
        """How many are chosen by at least one of so many tokens, if each is as likely as the others."""
        return self.count * (1 - (1 - self.top_k / self.count) ** tokens)

    def config(self) -> dict[str, Any]:
        return {
            "num_experts": self.count,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only model with gated MLPs, or with experts of that form; the first fields as in its config."""

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
    experts: Experts | None = None
    """In place of each layer's MLP."""
    window: int = 0
    """Of every layer; 0: none."""
    int4_group: int = 0
    """Columns of a group of the layers' weights in 4 bits; 0: they are in bfloat16."""

    @property
    def attention_parameters(self) -> int:
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer that a token is multiplied with."""
        if self.experts is None:
            return self.attention_parameters + 3 * self.hidden_size * self.intermediate_size
        chosen = 3 * self.experts.size * self.experts.top_k
        return self.attention_parameters + self.hidden_size * (self.experts.count + chosen)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Columns of the output and of the input of a layer's matrices, by their names in the layer."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        width, inner = self.hidden_size, self.intermediate_size
        return {
            "self_attn.q_proj": (query, width),
            "self_attn.k_proj": (key, width),
            "self_attn.v_proj": (key, width),
            "self_attn.o_proj": (width, query),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_NUMBER

    def decode_bytes(self, batch: int, context_tokens: float) -> float:
        """The minimum that a decode step reads: all linear weights, the output head included, and each row's keys and
        values. Of experts those that so many tokens choose when each one is as likely as the others."""
        seen = min(context_tokens, self.window or context_tokens)
        layers = self.num_layers * self._layer_bytes(batch)
        return layers + self.vocab_size * self.hidden_size * BYTES_PER_NUMBER + batch * seen * self.kv_bytes_per_token

    def _layer_bytes(self, batch: int) -> float:
        if self.experts is None:
            scale_bytes = BYTES_PER_NUMBER / self.int4_group if self.int4_group else 0.0
            return self.layer_parameters * ((0.5 if self.int4_group else BYTES_PER_NUMBER) + scale_bytes)
        read = 3 * self.experts.size * self.experts.expected(batch)
        return BYTES_PER_NUMBER * (self.attention_parameters + self.hidden_size * (self.experts.count + read))

    def prefill_flops(self, num_prompts: int, prompt_tokens: int) -> float:
        """A multiply-add counts as two. The head runs once per prompt; causal attention computes half of the square."""
        tokens = num_prompts * prompt_tokens
        linear = 2.0 * tokens * self.num_layers * self.layer_parameters
        attention = 2.0 * tokens * prompt_tokens * self.num_layers * self.num_heads * self.head_dim
        return linear + attention + 2.0 * num_prompts * self.vocab_size * self.hidden_size

    def config(self) -> dict[str, Any]:
        """config.json as transformers reads it."""
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
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
            **({} if self.experts is None else self.experts.config()),
            **({"sliding_window": self.window} if self.window else {}),
            **dict(self.extra),
        }

    def write(self, directory: Path) -> Path:
        """A checkpoint folder without weights: engines draw them, if they are not of 4 bits (int4_checkpoint.py)."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config(), indent=1))
        return directory


def _rope(theta: float, **more: Any) -> tuple[tuple[str, Any], ...]:
    return (("rope_parameters", {"rope_type": "default", "rope_theta": theta, **more}),)


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, True, _rope(1e6)),
    "qwen3-1.7b": Shape("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 40960, True, _rope(1e6)),
    "llama-3.1-8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, False, _rope(5e5)),
    "llama-3.1-8b-int4": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, False, _rope(5e5), int4_group=128),
    "qwen3-30b-a3b-12-layers": Shape(
        "qwen3_moe", 151936, 2048, 6144, 12, 32, 4, 128, 40960, False, _rope(1e6), Experts(128, 8, 768)
    ),
    "mistral-7b-v0.1-4-layers": Shape(
        "mistral", 32000, 4096, 14336, 4, 32, 8, 128, 32768, False, _rope(1e4), window=4096
    ),
    "tiny": Shape("llama", 512, 64, 128, 2, 4, 2, 32, 512, True, _rope(1e4)),
    "tiny-int4": Shape("llama", 512, 64, 128, 2, 4, 2, 32, 512, True, _rope(1e4), int4_group=32),
    "tiny-experts": Shape("qwen3_moe", 512, 64, 128, 2, 4, 2, 32, 512, True, _rope(1e4), Experts(8, 2, 32)),
    "tiny-window": Shape("mistral", 512, 64, 128, 1, 4, 2, 32, 512, True, _rope(1e4), window=48),
}
"""12 of 48 layers, and 4 of 32: enough for the time of a layer. Those that are `tiny` are for trying the benchmark
itself where there is no GPU."""
