"""Attention to some of the positions, where these are all: an indexer chooses as many as there are, or they are in one
chunk.

For: the loader. Does not know: families by name, how positions are scored. Invariant: a model whose queries would read
fewer positions than its sequences may have is refused.
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
    """That each query reads; None: all."""
    text = config.get_text_config(decoder=True)
    kinds = _STATED.keys() & set(getattr(text, "layer_types", None) or ())
    limits = [_positions_of(config, kind) for kind in kinds]
    if getattr(text, "attn_temperature_tuning", False):  # Llama 4's queries grow from the last of these on
        limits.append(int(text.floor_scale) - 1)
    return min((limit for limit in limits if limit is not None), default=None)


def why_not_all(config: Any, max_model_len: int) -> str:
    """Why plain attention is not what the model computes; "" where it is."""
    most = most_positions(config)
    if most is None or max_model_len <= most:
        return ""
    return (
        f"not all queries read all of max_model_len {max_model_len} positions, and only up to {most} is its attention "
        f"plain: set the engine argument 'max_model_len' to {most} at most (--max-model-len {most})"
    )


def read_all_positions(model: Any) -> None:
    """Removes what chooses positions from a model for which why_not_all is ""."""
    if most_positions(model.config) is None:
        return
    for module in list(model.modules()):
        if hasattr(module, "indexer"):
            _remove_indexer(module)
        if hasattr(module, "attn_temperature_tuning"):  # of a flattened batch it would number the tokens
            module.attn_temperature_tuning = False


def _remove_indexer(module: Any) -> None:
    indexer = module.indexer
    if isinstance(indexer, nn.Module):
        del module.indexer
    # Without one, a layer takes another layer's choice, where it does not choose blocks.
    module.indexer = None if hasattr(module.config, "index_topk_blocks") else _all_positions
    module.forward = functools.partial(_with_mask, module.forward)


def _all_positions(hidden_states: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor | None:
    """Indices [batch, tokens, tokens], of which transformers' own attention makes a mask."""
    if is_active():
        return None
    batch, num_tokens, _ = hidden_states.shape
    return torch.arange(num_tokens, dtype=torch.int32, device=hidden_states.device).expand(batch, num_tokens, -1)


def _with_mask(forward: Callable[..., Any], *args: Any, attention_mask: Any = None, **options: Any) -> Any:
    """These modules cut what the indexer gets out of the mask."""
    return forward(*args, attention_mask=UnmadeMask() if attention_mask is None else attention_mask, **options)
