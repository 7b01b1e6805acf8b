"""Our attention function in the registry of `transformers`, and its context for a step.

For any `transformers` model whose layers call `ALL_ATTENTION_FUNCTIONS`, run with `attn_implementation=PAGED_ATTENTION`
inside `active_context(...)`. Only the context knows where keys and values are stored. Invariant: a call outside an
active context of the same thread fails, so a model never attends to the wrong batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PAGED_ATTENTION = "llmbackend_paged"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV shape of one attention layer; layers of one model may differ."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer requests from attention beyond causality."""

    scaling: float
    """Factor on q·k."""
    sliding_window: int | None = None
    """A query attends to this many positions, its own included; None = all."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap); None = off."""
    sinks: torch.Tensor | None = None
    """[num_heads]: an extra score per head in the softmax, without a value; None = none."""
    slopes: torch.Tensor | None = None
    """[num_heads]: ALiBi adds slope * (key position - query position) to scores, before the softcap; None = none."""
    mask: torch.Tensor | None = None
    """The layer's own mask; no backend supports one."""
    extra: Mapping[str, Any] | None = None
    """All other arguments of the layer."""


class UnmadeMask:
    """Stands for the mask that is not created, for modules that slice it."""

    def __getitem__(self, _part: object) -> UnmadeMask:
        return self


class AttentionContext(Protocol):
    """Called by the registered function. It knows the ragged layout of the step's flattened batch."""

    def attend(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query [tokens, heads, head_dim], key [tokens, kv_heads, head_dim], value [tokens, kv_heads, value_dim], in
        the model's dtype → [tokens, heads, value_dim] in query's dtype."""


class _Active(threading.local):
    context: AttentionContext | None = None
    mask_windows: set[int] | None = None


_active = _Active()


@contextmanager
def active_context(context: AttentionContext) -> Iterator[None]:
    """Directs attention calls of this thread to `context` within the block."""
    previous, _active.context = _active.context, context
    try:
        yield
    finally:
        _active.context = previous


def is_active() -> bool:
    return _active.context is not None


@contextmanager
def noted_mask_windows() -> Iterator[set[int]]:
    """Collects the windows of the masks that models request on this thread; the masks are not made."""
    previous, _active.mask_windows = _active.mask_windows, set()
    try:
        yield _active.mask_windows
    finally:
        _active.mask_windows = previous


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | UnmadeMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The signature that `transformers` expects: query [1, heads, tokens, head_dim]; returns ([1, tokens, heads, dim],
    None)."""
    context = _active.context
    if context is None:
        raise RuntimeError(f"attention '{PAGED_ATTENTION}' was called outside a step of the engine")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window or None,
        softcap=softcap or None,
        sinks=s_aux,
        slopes=slopes,
        mask=None if isinstance(attention_mask, UnmadeMask) else attention_mask,
        extra=extra,
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return context.attend(module, q, k, v, options).unsqueeze(0), None


def _no_mask(*_args: Any, local_size: int | None = None, **_kwargs: Any) -> None:
    """Causality and sequence boundaries are up to the context."""
    if local_size is not None and _active.mask_windows is not None:
        _active.mask_windows.add(local_size)


def register() -> None:
    """Registers PAGED_ATTENTION with `transformers`. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, _no_mask)
