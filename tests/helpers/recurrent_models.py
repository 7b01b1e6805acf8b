"""Tiny random models with recurrent layers, and one with experts."""

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
    "qwen3_5": tf.Qwen3_5TextConfig(
        **SIZES, num_hidden_layers=4, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=48,
        linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
    "lfm2": tf.Lfm2Config(
        **SIZES, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"], conv_bias=True,
        block_auto_adjust_ff_dim=False,
    ),
    "lfm3": tf.Lfm3Config(
        **SIZES, num_hidden_layers=5, head_dim=64, conv_bias=True, sliding_window=24,
        layer_types=["conv", "full_attention", "conv", "sliding_attention", "conv"],
    ),
    "olmo_hybrid": tf.OlmoHybridConfig(
        **SIZES, num_hidden_layers=4, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=48,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_allow_neg_eigval=True,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "granitemoehybrid": tf.GraniteMoeHybridConfig(
        **SIZES, num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=0,
        shared_intermediate_size=96, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=24, mamba_d_head=32,
        residual_multiplier=0.7, embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.1,
    ),
    "lfm2_moe": tf.Lfm2MoeConfig(
        **SIZES, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"], num_dense_layers=1,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, routed_scaling_factor=1.5,
    ),
    "bamba": tf.BambaConfig(
        **SIZES, num_hidden_layers=4, attn_layer_indices=[2], mamba_n_heads=8, mamba_d_state=32, mamba_d_head=32,
    ),
    "granitemoehybrid with experts": tf.GraniteMoeHybridConfig(
        **SIZES | {"initializer_range": 0.06}, num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=96, mamba_n_heads=8, mamba_d_state=32, mamba_d_head=32, residual_multiplier=0.7,
        embedding_multiplier=3.0, attention_multiplier=0.1,
    ),
    "qwen3_next": tf.Qwen3NextConfig(
        **SIZES | {"initializer_range": 0.06}, num_hidden_layers=4, head_dim=64, linear_key_head_dim=32,
        linear_value_head_dim=48, linear_num_key_heads=2, linear_num_value_heads=6, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=32, mlp_only_layers=[1],
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "falcon_h1": tf.FalconH1Config(
        **SIZES, num_hidden_layers=3, mamba_d_ssm=192, mamba_n_heads=6, mamba_d_state=32, mamba_n_groups=2,
        embedding_multiplier=2.0, lm_head_multiplier=0.5, key_multiplier=0.6, attention_in_multiplier=1.3,
        attention_out_multiplier=0.9, ssm_in_multiplier=1.2, ssm_out_multiplier=0.7, mlp_multipliers=[0.8, 1.4],
        ssm_multipliers=[0.7, 1.3, 0.8, 1.1, 0.9], attention_bias=True, mamba_proj_bias=True, projectors_bias=True,
    ),
    "nemotron_h": tf.NemotronHConfig(
        **SIZES, layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
        head_dim=64, mamba_num_heads=6, mamba_head_dim=32, ssm_state_size=24, n_groups=2, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, moe_shared_expert_intermediate_size=96,
        routed_scaling_factor=1.5,
    ),
    "falcon_h1 with norms": tf.FalconH1Config(
        **SIZES, num_hidden_layers=2, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_state=24, mamba_n_groups=2,
        mamba_rms_norm=True, mamba_norm_before_gate=False, time_step_limit=(0.0, float("inf")),
    ),
    "mamba2": tf.Mamba2Config(
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        num_heads=4, head_dim=64, state_size=24, n_groups=2, num_hidden_layers=3, max_position_embeddings=192,
    ),
    "qwen3_5_moe": tf.Qwen3_5MoeTextConfig(
        **SIZES | {"initializer_range": 0.06},  # with more, roundings to 16 bits choose other experts
        num_hidden_layers=4, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
}  # fmt: skip
"""By family. Every fifth has another kind of recurrent layer (delta rule, convolutions, Mamba), since most tests are
daily for these alone (tests/helpers/tiers.py)."""
EXPERTS = tf.Qwen3MoeConfig(
    **SIZES, num_hidden_layers=3, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
)


def spread_model(family: str, **changes: Any) -> Any:
    """A model of a recurrent family, as `spread`. changes: of the configuration."""
    return spread(RECURRENT[family], **changes)


def spread(config: Any, **changes: Any) -> Any:
    """Float32 weights spread wide enough that greedy output does not fall into repeating one token."""
    torch.manual_seed(5)
    config = copy.deepcopy(config)
    config.update(changes)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.5 if "embed" in name or "conv" in name else 0.12)
    return model


def make_recurrent(checkpoint: Path) -> None:
    replace_weights(checkpoint, RECURRENT["qwen3_5"])


def make_experts(checkpoint: Path) -> None:
    replace_weights(checkpoint, EXPERTS)


def replace_weights(checkpoint: Path, config: Any) -> None:
    """A copy of the bundled model gets other weights, and keeps its tokenizer and template."""
    known = json.loads((checkpoint / "config.json").read_text())
    kept = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    spread(config, **{name: known[name] for name in kept}).save_pretrained(checkpoint)
