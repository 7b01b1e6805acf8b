"""Redirects older families, whose attention is hard-coded in their modules, to the attention interface while a context
is active.

Used by `check_config`, before such a model is created. Invariant: without an active context the modules compute what
they always did, so the check compares both. Families whose attention is more than a softmax of scaled products are
refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from .interface import PAGED_ATTENTION, attention_function, is_active

Method = Callable[..., Any]
_ALIBI: Final = "its attention adds a bias by distance to the scores (ALiBi), which paged attention does not"


def why_not(config: Any) -> str:
    """Why attention of this kind cannot be redirected to the interface; "" = no reason is known."""
    has_alibi = getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt")
    return _ALIBI if has_alibi else ""


def tables_of(model_class: Any) -> list[dict[str, Any]]:
    """Tables from which older code selects its attention class."""
    code = vars(sys.modules[model_class.__module__])
    return [value for name, value in code.items() if name.endswith("ATTENTION_CLASSES")]


def lead_to_interface(model_class: Any) -> None:
    """Makes a class in _ADAPTED accept our attention, as newer ones do. Idempotent."""
    if model_class.__name__ not in _ADAPTED or vars(model_class).get("_can_set_attn_implementation_cached_value"):
        return
    attention, method, adapted = _ADAPTED[model_class.__name__]
    code = sys.modules[model_class.__module__]
    own_class = getattr(code, attention)
    setattr(own_class, method, _instead_of(getattr(own_class, method), adapted))
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
    module: Any, hidden_states: torch.Tensor, *_args: Any, position_embeddings: Any, **_options: Any
) -> tuple[torch.Tensor, None]:
    """Falcon's own forward repeats keys and values for each query head."""
    query, key, value = module._split_heads(module.query_key_value(hidden_states))
    repeats = key.shape[2] // module.num_kv_heads
    q, k, v = (each.transpose(1, 2) for each in (query, key[:, :, ::repeats], value[:, :, ::repeats]))
    q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
    output, _ = attention_function(module, q, k, v, None, scaling=module.inv_norm_factor)
    return module.dense(output.flatten(2)), None


_ADAPTED: Final[Mapping[str, tuple[str, str, Method]]] = {
    "CodeGenForCausalLM": ("CodeGenAttention", "_attn", _scaled),
    "FalconForCausalLM": ("FalconAttention", "forward", _falcon),
    "GPTJForCausalLM": ("GPTJAttention", "_attn", _scaled),
    "GPTNeoForCausalLM": ("GPTNeoSelfAttention", "_attn", _scaled),
    "GPTNeoXJapaneseForCausalLM": ("GPTNeoXJapaneseAttention", "_attn", _scaled),
}
"""The attention class, the method to replace, and its replacement."""
