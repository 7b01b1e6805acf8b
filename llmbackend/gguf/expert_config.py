"""The experts of a GGUF model and their selection, and the latent attention of DeepSeek-like models.

Used by model_config.py; same invariant.
"""

from __future__ import annotations

from typing import Any, Final

from .errors import GgufError
from .families import SIGMOID, SOFTMAX
from .fields import Fields
from .header import Header

Config = dict[str, Any]
MAX_EXPERTS: Final = 1024


def expert_counts(fields: Fields, name: str) -> Config:
    """name: transformers' name for the number of experts."""
    count = fields.integer("expert_count", most=MAX_EXPERTS)
    return {name: count, "num_experts_per_tok": fields.integer("expert_used_count", most=count)}


def _shares(fields: Fields) -> Config:
    """For families like DeepSeek: how experts are selected and weighted."""
    return {
        "n_shared_experts": fields.integer("expert_shared_count"),
        "routed_scaling_factor": fields.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": fields.boolean("expert_weights_norm", False),
        "n_group": fields.integer("expert_group_count", 1),
        "topk_group": fields.integer("expert_group_used_count", 1),
    }


def nemotron_experts(fields: Fields) -> Config:
    if not fields.has("expert_count"):
        return {}
    if fields.has("moe_latent_size"):
        raise GgufError("its field 'nemotron_h_moe.moe_latent_size' is not supported, expected none")
    return {
        **expert_counts(fields, "n_routed_experts"),
        **_shares(fields),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
    }


def deepseek_v2(header: Header, fields: Fields, config: Config) -> Config:
    """Shares come from a softmax over all experts."""
    chosen_by, renormalises = (
        fields.integer("expert_gating_func", 0, least=0),
        fields.boolean("expert_weights_norm", False),
    )
    if chosen_by not in (0, SOFTMAX) or renormalises:
        raise GgufError(
            f"its field 'deepseek2.expert_gating_func' is {chosen_by}, 'deepseek2.expert_weights_norm' {renormalises}, "
            f"expected {SOFTMAX} (softmax) and false, or {SIGMOID} (sigmoid)"
        )
    found = deepseek(header, fields, config)
    return found | {"topk_method": "greedy" if found["n_group"] == 1 else "group_limited_greedy"}


def deepseek(header: Header, fields: Fields, config: Config) -> Config:
    """Files from before April 2025 state only the widths of heads, newer ones also those of the absorbed form."""
    if fields.number("attention.temperature_scale", 0.0):
        raise GgufError("its field 'deepseek2.attention.temperature_scale' is not supported, expected none")
    ending, rotary = "_mla" if fields.has("attention.key_length_mla") else "", config["head_dim"]
    key = fields.integer(f"attention.key_length{ending}", least=rotary + 1)
    return {
        **expert_counts(fields, "n_routed_experts"),
        **_shares(fields),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": fields.integer("attention.q_lora_rank") if "blk.0.attn_q_a.weight" in header.tensors else None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": fields.integer(f"attention.value_length{ending}"),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, least=0),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "rope_interleave": True,
        "rope_parameters": _deepseek_rope(fields, config["rope_parameters"]),
    }


def _deepseek_rope(fields: Fields, rope: Config) -> Config:
    """The logarithm's factor is a tenth of the model's own. Assumes that both factors of a model are equal."""
    if rope["rope_type"] != "yarn" or not fields.has("rope.scaling.yarn_log_multiplier"):
        return rope
    factor = round(10 * fields.number("rope.scaling.yarn_log_multiplier"), 6)
    return {**rope, "mscale": factor, "mscale_all_dim": factor}
