"""Redirects older families, whose attention is hard-coded in their modules, to the attention interface while a context
is active.

Used by `check_config`, before such a model is created. Invariant: without an active context the modules compute what
they always did, so the check compares both.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from .interface import PAGED_ATTENTION, attention_function, is_active

Method = Callable[..., Any]


def implementation_of(config: Any) -> str:
    """The attention of transformers to compare with: Falcon's "eager" adds the biases of ALiBi twice."""
    return "sdpa" if config.model_type == "falcon" and config.alibi else "eager"


def tables_of(model_class: Any) -> list[dict[str, Any]]:
    """Tables from which older code selects its attention class."""
    code = vars(sys.modules[model_class.__module__])
    return [value for name, value in code.items() if name.endswith("ATTENTION_CLASSES")]


def lead_to_interface(model_class: Any) -> None:
    """Makes a class in _ADAPTED accept our attention, as newer ones do. Idempotent."""
    if model_class.__name__ not in _ADAPTED or vars(model_class).get("_can_set_attn_implementation_cached_value"):
        return
    attention, method, adapted = _ADAPTED[model_class.__name__]
    code: Any = sys.modules[model_class.__module__]
    own_class = getattr(code, attention)
    setattr(own_class, method, _instead_of(getattr(own_class, method), adapted))
    if model_class.__name__ == "MptForCausalLM":
        code.create_causal_mask = _instead_of(code.create_causal_mask, _no_mask)
    for table in tables_of(model_class):
        table[PAGED_ATTENTION] = table["eager"]
    model_class._can_set_attn_implementation_cached_value = True


def _instead_of(own: Method, adapted: Method) -> Method:
    @functools.wraps(own)
    def method(*args: Any, **options: Any) -> Any:
        return (adapted if is_active() else own)(*args, **options)

    return method


def _scaled(module: Any, query: Any, key: Any, value: Any, _mask: Any = None) -> tuple[torch.Tensor, None]:
    divisor = getattr(module, "scale_attn", None) or getattr(module, "norm_factor", None) or 1.0
    window = module.config.window_size if getattr(module, "attention_type", "") == "local" else None
    q, k = query.to(value.dtype), key.to(value.dtype)
    output, _ = attention_function(module, q, k, value, None, scaling=1.0 / float(divisor), sliding_window=window)
    return output.transpose(1, 2), None


def _falcon(
    module: Any, hidden_states: torch.Tensor, alibi: torch.Tensor | None, *_args: Any, position_embeddings: Any,
    **_options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Falcon's own forward repeats keys and values for each query head."""
    query, key, value = module._split_heads(module.query_key_value(hidden_states))
    repeats = key.shape[2] // module.num_kv_heads
    q, k, v = (each.transpose(1, 2) for each in (query, key[:, :, ::repeats], value[:, :, ::repeats]))
    slopes = None
    if alibi is None:
        q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        slopes = module.inv_norm_factor * _slopes_of(module, q.device)
    output, _ = attention_function(module, q, k, v, None, scaling=module.inv_norm_factor, slopes=slopes)
    return module.dense(output.flatten(2)), None


def _bloom(
    module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_args: Any, **_options: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    slopes = _slopes_of(module, q.device)
    output, _ = attention_function(module, q, k, v, None, scaling=module.inv_norm_factor, slopes=slopes)
    return module.dense(output.flatten(2)) + residual, None


def _slopes_of(module: Any, device: torch.device) -> torch.Tensor:
    """Of Bloom's and Falcon's ALiBi."""
    return _known_slopes(type(module).__module__, int(module.num_heads)).to(device)


@functools.cache
def _known_slopes(code: str, num_heads: int) -> torch.Tensor:
    two_tokens = torch.ones((1, 2), dtype=torch.long, device="cpu")
    biases: torch.Tensor = sys.modules[code].build_alibi_tensor(two_tokens, num_heads, torch.float32)
    return biases[:, 0, 1]


def _mpt(
    module: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor, *_args: Any, **_options: Any
) -> tuple[torch.Tensor, None]:
    """position_bias [heads, 1, max_seq_len]: up to the last key, which has none."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (each.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for each in mixed.chunk(3, dim=-1))
    slopes = -position_bias[:, 0, -2]
    output, _ = attention_function(module, q, k, v, None, scaling=float(module.softmax_scale), slopes=slopes)
    return module.out_proj(output.flatten(2)), None


def _no_mask(**_options: Any) -> torch.Tensor:
    """MPT asks for a type of it."""
    return torch.empty(0)


_ADAPTED: Final[Mapping[str, tuple[str, str, Method]]] = {
    "BloomForCausalLM": ("BloomAttention", "forward", _bloom),
    "CodeGenForCausalLM": ("CodeGenAttention", "_attn", _scaled),
    "FalconForCausalLM": ("FalconAttention", "forward", _falcon),
    "GPTJForCausalLM": ("GPTJAttention", "_attn", _scaled),
    "GPTNeoForCausalLM": ("GPTNeoSelfAttention", "_attn", _scaled),
    "GPTNeoXJapaneseForCausalLM": ("GPTNeoXJapaneseAttention", "_attn", _scaled),
    "MptForCausalLM": ("MptAttention", "forward", _mpt),
}
"""The attention class, the method to replace, and its replacement."""
