"""Shared by tests of the accelerator path: tiny random models of the families that run as programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
FAMILIES: dict[str, Any] = {
    "llama": tf.LlamaConfig(**SIZES),
    "llama tied": tf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": tf.Qwen2Config(**SIZES),
    "qwen3": tf.Qwen3Config(**SIZES, head_dim=32),
    "gemma2": tf.Gemma2Config(**SIZES, head_dim=32, sliding_window=9, attn_logit_softcapping=2.0),
    "gemma3": tf.Gemma3TextConfig(**SIZES, **MIXED, head_dim=32),
    "phi3": tf.Phi3Config(**SIZES),
    "olmo2": tf.Olmo2Config(**SIZES),
    "granite": tf.GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.7),
    "smollm3": tf.SmolLM3Config(**SIZES),
    "granite 4": tf.GraniteMoeHybridConfig(
        **SIZES, layer_types=["full_attention"] * 3, position_embedding_type="rope", num_local_experts=0,
        shared_intermediate_size=96, mamba_n_heads=8, logits_scaling=3.0, residual_multiplier=0.7,
    ),
}  # fmt: skip
CHOICES = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
WITH_EXPERTS: dict[str, Any] = {
    "qwen3_moe": tf.Qwen3MoeConfig(
        **SIZES | CHOICES, head_dim=32, num_experts=6, moe_intermediate_size=48, norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
    "qwen3_moe renormalised": tf.Qwen3MoeConfig(
        **SIZES | CHOICES, head_dim=32, num_experts=5, moe_intermediate_size=48, norm_topk_prob=True
    ),
    "mixtral": tf.MixtralConfig(**SIZES | CHOICES, num_local_experts=4),
    "gpt_oss": tf.GptOssConfig(**SIZES | CHOICES | MIXED, head_dim=32, num_local_experts=6),
}  # fmt: skip


def save(config: Any, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A random model with weights spread wide enough that greedy output does not repeat one token, biases included."""
    torch.manual_seed(5)
    kind = tf.AutoModelForImageTextToText if hasattr(config, "vision_config") else tf.AutoModelForCausalLM
    # Its own attention: transformers 5.17 would choose torch's for Gemma 2, which has no soft cap.
    model = kind.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_()
            elif parameter.dim() >= 2:
                parameter.mul_(4)
    model.save_pretrained(path)
    return model
