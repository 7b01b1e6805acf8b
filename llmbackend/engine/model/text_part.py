"""The part of a model for images and text that computes text; other models are it themselves, but for indexers.

For: the loader and descriptions. Does not know: families.
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
    """Gives away the parts that text does not need, and indexers that would choose all positions."""
    base, text = model.base_model, text_part(model)
    for name, child in list(base.named_children()) if text is not base else ():
        if child is not text:
            setattr(base, name, nn.Identity())
    read_all_positions(model)
