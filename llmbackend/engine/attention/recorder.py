"""Attention without a cache that notes what a model asks for: used once, when a model is loaded.

For: the loader, which learns the KV shape of every layer and checks that the model can be run in flattened batches.
Does not know: paging. Invariant: computes each sequence of the flattened batch on its own, causally, with all options.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .interface import AttentionOptions
from .kv_cache import LayerShape
from .reference import grouped_attention

# Tensors that layers pass along and that do not change the attention itself.
_HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "input_ids"})


class RecordingAttention:
    """Attends within sequences of the given lengths; `shapes` and `options` have one entry per layer seen, `problems`
    what cannot be honoured by a paged backend."""

    def __init__(self, sequence_lens: Sequence[int]) -> None:
        self._sequence_lens = list(sequence_lens)
        self.shapes: dict[nn.Module, LayerShape] = {}
        self.options: dict[nn.Module, AttentionOptions] = {}
        self.calls: list[nn.Module] = []
        self.problems: list[str] = []
        self.num_sliding_layers = 0

    def attend(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.calls.append(layer)
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.options[layer] = options
        self.num_sliding_layers += options.sliding_window is not None
        self._check(query, key, options)
        split = (torch.split(tensor, self._sequence_lens) for tensor in (query, key, value))
        return torch.cat([_causal(q, k, v, options) for q, k, v in zip(*split, strict=True)])

    def _check(self, query: torch.Tensor, key: torch.Tensor, options: AttentionOptions) -> None:
        extra = options.extra or {}
        if query.shape[0] != sum(self._sequence_lens) or key.shape[0] != query.shape[0]:
            self.problems.append(f"a layer attends to {key.shape[0]} keys for {query.shape[0]} flattened tokens")
        if options.mask is not None:
            self.problems.append("a layer brings its own attention mask")
        if extra.get("is_causal") is False:
            self.problems.append("a layer attends in both directions")
        for name, given in extra.items():
            if isinstance(given, torch.Tensor) and name not in _HARMLESS:
                self.problems.append(f"a layer passes '{name}' to attention")


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    positions = torch.arange(query.shape[0], device=query.device)
    distance = positions[:, None] - positions[None]
    visible = distance >= 0
    if options.sliding_window is not None:
        visible &= distance < options.sliding_window
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return grouped_attention(q, k, v, visible[None], options)[0].transpose(0, 1)
