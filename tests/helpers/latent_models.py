"""Small random models with multi-head latent attention (MLA), with heads and latents of realistic sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 96,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 192,
    "bos_token_id": None,
    "eos_token_id": 511,
    "pad_token_id": None,
    "initializer_range": 0.08,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48, "mscale": 1.0,
    "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "deepseek_v2_lite": tf.DeepseekV2Config(
        **SIZES, q_lora_rank=None, kv_lora_rank=512, n_group=1, topk_group=1, topk_method="greedy",
        rope_parameters=_YARN,
    ),
    "deepseek_v2": tf.DeepseekV2Config(
        **SIZES, q_lora_rank=96, kv_lora_rank=64, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=2.5, attention_bias=True,
    ),
    "deepseek_v3": tf.DeepseekV3Config(
        **SIZES, q_lora_rank=96, kv_lora_rank=512, n_group=4, topk_group=2, routed_scaling_factor=1.5,
        norm_topk_prob=True, rope_parameters=_YARN,
    ),
    "glm4_moe_lite": tf.Glm4MoeLiteConfig(
        **SIZES, q_lora_rank=96, kv_lora_rank=64, n_group=1, topk_group=1, routed_scaling_factor=1.8,
    ),
    "glm_moe_dsa": tf.GlmMoeDsaConfig(
        **SIZES, q_lora_rank=96, kv_lora_rank=64, routed_scaling_factor=1.8, index_topk=192, index_n_heads=2,
        index_head_dim=64, index_topk_freq=2,
    ),
}  # fmt: skip
"""By families, with the shapes of their attention."""


def latent_model(family: str) -> Any:
    """In float32, every part of it random."""
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(LATENT[family], dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and (name.endswith(("bias", "weight"))):
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model.eval()
