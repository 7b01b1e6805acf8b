"""The text part of a multimodal model; for other models, the whole base model, except for indexers.

Used by the loader and by descriptions.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .sparse_attention import read_all_positions


def text_part(model: Any) -> Any:
    base = model.base_model
    parts = (getattr(base, name, None) for name in ("language_model", "text_model"))
    return next((part for part in parts if isinstance(part, nn.Module)), base)


def keep_text(model: Any) -> None:
    """Removes the parts that text does not need, and indexers that would select all positions."""
    base, text = model.base_model, text_part(model)
    for name, child in list(base.named_children()) if text is not base else ():
        if child is not text:
            setattr(base, name, nn.Identity())
    read_all_positions(model)
