"""Tiny random models with recurrent layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 192,
    "bos_token_id": None,
    "eos_token_id": 511,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
RECURRENT: dict[str, Any] = {
    "lfm2": tf.Lfm2Config(
        **SIZES, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"], conv_bias=True,
        block_auto_adjust_ff_dim=False,
    ),
    "qwen3_5": tf.Qwen3_5TextConfig(
        **SIZES, num_hidden_layers=4, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=48,
        linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
    "granitemoehybrid": tf.GraniteMoeHybridConfig(
        **SIZES, num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=0,
        shared_intermediate_size=96, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=24, mamba_d_head=32,
        residual_multiplier=0.7, embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.1,
    ),
    "bamba": tf.BambaConfig(
        **SIZES, num_hidden_layers=4, attn_layer_indices=[2], mamba_n_heads=8, mamba_d_state=32, mamba_d_head=32,
    ),
    "qwen3_5_moe": tf.Qwen3_5MoeTextConfig(
        **SIZES | {"initializer_range": 0.06},  # with more, roundings to 16 bits choose other experts
        num_hidden_layers=4, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
}  # fmt: skip
"""By family."""


def spread_model(family: str, **changes: Any) -> Any:
    """Float32 weights spread wide enough that greedy output does not fall into repeating one token. changes: of the
    configuration."""
    torch.manual_seed(5)
    config = copy.deepcopy(RECURRENT[family])
    config.update(changes)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.5 if "embed" in name or "conv" in name else 0.12)
    return model


def make_recurrent(checkpoint: Path, family: str = "qwen3_5") -> None:
    """A copy of the bundled model gets other weights, and keeps its tokenizer and template."""
    known = json.loads((checkpoint / "config.json").read_text())
    kept = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    spread_model(family, **{name: known[name] for name in kept}).save_pretrained(checkpoint)
