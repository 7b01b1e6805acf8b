"""Sparse attention (an indexer selects positions, or a query reads only its own chunk) in sequences so short that every
position is read anyway.

Used by the loader. Independent of families by name and of how indexers score positions. Invariant: a model is refused
if its sequences may be longer than that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from ..attention.interface import UnmadeMask, is_active

_STATED: Final = {
    "indexed_attention": ("index_topk",),
    "minimax_m3_sparse": ("index_topk_blocks", "index_block_size"),
    "chunked_attention": ("attention_chunk_size",),
}
"""By kinds of layers, the keys of a config whose product is the number of positions that a query reads."""


def sparse_layer_types(config: Any) -> frozenset[str]:
    """Kinds of layers whose queries read as many positions as the text model's config states."""
    return frozenset(kind for kind in _STATED if _positions_of(config, kind) is not None)


def _positions_of(config: Any, kind: str) -> int | None:
    text = config.get_text_config(decoder=True)
    stated = [getattr(text, name, None) for name in _STATED[kind]]
    numbers = [number for number in stated if isinstance(number, int)]
    return math.prod(numbers) if len(numbers) == len(stated) else None


def most_positions(config: Any) -> int | None:
    """The longest sequence in tokens whose queries all read every position, unscaled; None = any."""
    text = config.get_text_config(decoder=True)
    kinds = _STATED.keys() & set(getattr(text, "layer_types", None) or ())
    limits = [_positions_of(config, kind) for kind in kinds]
    if getattr(text, "attn_temperature_tuning", False):  # Llama 4 scales queries from position floor_scale - 1 on
        limits.append(int(text.floor_scale) - 1)
    return min((limit for limit in limits if limit is not None), default=None)


def why_not_all(config: Any, max_model_len: int) -> str:
    """Why plain attention would differ from what the model computes; "" = it would not."""
    most = most_positions(config)
    if most is None or max_model_len <= most:
        return ""
    return (
        f"its attention is plain attention to all positions only in sequences of up to {most} tokens, and "
        f"max_model_len is {max_model_len}: set the engine argument 'max_model_len' to at most {most} "
        f"(--max-model-len {most})"
    )


def read_all_positions(model: Any) -> None:
    """Removes what chooses positions, or scales queries, from a model for which why_not_all returns ""."""
    if most_positions(model.config) is None:
        return
    for module in list(model.modules()):
        if hasattr(module, "indexer"):
            _remove_indexer(module)
        if hasattr(module, "attn_temperature_tuning"):  # it counts the tokens of a flattened batch as positions
            module.attn_temperature_tuning = False


def _remove_indexer(module: Any) -> None:
    indexer = module.indexer
    if isinstance(indexer, nn.Module):
        del module.indexer
    # A layer without an indexer reuses an earlier layer's choice; where blocks are chosen, it attends to all positions.
    module.indexer = None if hasattr(module.config, "index_topk_blocks") else _all_positions
    module.forward = functools.partial(_with_mask, module.forward)


def _all_positions(hidden_states: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor | None:
    """In place of an indexer: all indices [batch, tokens, tokens], from which transformers' own attention makes a mask;
    None in a step of the engine."""
    if is_active():
        return None
    batch, num_tokens, _ = hidden_states.shape
    return torch.arange(num_tokens, dtype=torch.int32, device=hidden_states.device).expand(batch, num_tokens, -1)


def _with_mask(forward: Callable[..., Any], *args: Any, attention_mask: Any = None, **options: Any) -> Any:
    """These modules slice the mask for their indexer, so there must be something to slice."""
    return forward(*args, attention_mask=UnmadeMask() if attention_mask is None else attention_mask, **options)
