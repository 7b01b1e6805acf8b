"""A small config of any causal language model of transformers: few layers, experts and tokens, heads of a realistic
size.

Used by tests/helpers/families.py. Independent of engines. Invariant: a size is set where the family's own config has a
key of that name, so that a family that nobody has listed gets a model of its own structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import transformers as tf

VOCAB: Final = 128
_LAYERS: Final = 2
_HEADS: Final = 4
_KEYS: Final[dict[Any, tuple[str, ...]]] = {
    "vocab": ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "encoder_hash_byte_group_vocab"),
    "width": (
        "hidden_size", "d_model", "n_embd", "embedding_dim", "embedding_size", "input_embedding_size", "emb_dim",
        "word_embed_proj_dim", "output_embedding_size", "lru_width",
    ),
    "layers": (
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
        "num_encoder_layers", "num_decoder_layers", "num_blocks", "num_layers_per_stack",
    ),
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
        "swa_num_attention_heads",
    ),
    "head": (
        "head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "dim_head", "attention_head_size", "d_head",
    ),
    "half of a head": ("qk_rope_head_dim", "qk_nope_head_dim"),
    192: (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size", "dim_ff",
        "dff", "d_inner", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size",
    ),
    96: (
        "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
        "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size",
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "context_length",
        "model_max_length", "seq_length",
    ),
    48: ("q_lora_rank",),
    64: ("mamba_d_head", "mamba_head_dim"),
    32: ("kv_lora_rank", "o_lora_rank", "mamba_d_state", "linear_key_head_dim", "linear_value_head_dim"),
    8: (
        "mamba_n_heads", "mamba_num_heads", "sliding_window", "sliding_window_size",
        "attention_window_size", "local_attention", "window_size",
    ),
    4: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "linear_num_value_heads"),
    2: (
        "linear_num_key_heads",
        "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups", "num_experts_per_tok",
        "num_experts_per_token", "moe_k", "moe_topk", "sliding_window_pattern", "_sliding_window_pattern",
        "global_attn_every_n_layers", "eos_token_id", "forced_eos_token_id",
    ),
    1: (
        "n_group", "num_expert_group", "topk_group", "first_k_dense_replace", "num_dense_layers",
        "moe_layer_start_index", "bos_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id",
        "mask_token_id", "eod_token_id", "is_decoder",
    ),
    0: ("pad_token_id",),
}  # fmt: skip
_SHARED_KV: Final = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_HYBRID: Final = {"layer_types": ["linear_attention", "full_attention"]}
_ROTARY_3D: Final = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
_CHANGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY_3D}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 512},
    "gemma3n_text": _SHARED_KV,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _HYBRID | {"num_local_experts": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 32},
    "mamba2": {"num_heads": 8},
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False, "concat_input": False},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides."""


def small_config(model_type: str, changes: Mapping[str, Any], head_dim: int) -> Any:
    """changes: beyond the sizes."""
    config_class = tf.CONFIG_MAPPING[model_type]
    return _small(config_class, _sizes(head_dim), {**_CHANGES.get(model_type, {}), **changes})


def _sizes(head_dim: int) -> dict[str, Any]:
    named = {
        "vocab": VOCAB, "width": _HEADS * head_dim, "layers": _LAYERS, "heads": _HEADS, "head": head_dim,
        "half of a head": head_dim // 2,
    }  # fmt: skip
    return {key: named.get(size, size) for size, keys in _KEYS.items() for key in keys} | {"is_decoder": True}


def _small(config_class: Any, sizes: dict[str, Any], changes: Mapping[str, Any]) -> Any:
    known = _defaults(config_class, sizes)
    own = {name: value for name, value in sizes.items() if name in known}
    if "qk_rope_head_dim" in known:  # attention by latent vectors (MLA): heads of parts, as many keys as queries
        head_dim = own.pop("head_dim", 2 * own["qk_rope_head_dim"])
        own |= {"qk_head_dim": head_dim, "v_head_dim": head_dim, "num_key_value_heads": _HEADS}
    parts = {
        name: _small(type(known[name]), sizes, _CHANGES.get(known[name].model_type, {}))
        for name in (getattr(config_class, "sub_configs", None) or {})
        if isinstance(known.get(name), tf.PreTrainedConfig)
    }
    return config_class(**(own | parts | dict(changes)))


def _defaults(config_class: Any, sizes: dict[str, Any]) -> Mapping[str, Any]:
    try:
        return dict(vars(config_class()))
    except Exception:  # it has no defaults that fit each other
        return sizes
