"""The maximum sequence length of a model, and one set of rotary frequencies for all its sequences.

Used by the loader. Invariant: the angle of a position depends only on the model and on max_model_len. transformers
chooses the frequencies of longrope and dynamic NTK by the longest sequence in a batch, so one request would change
another's tokens; here they are chosen once, as in vLLM, and used by the modules and all programs. Lengths follow vLLM's
rule for max_model_len.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logger = logging.getLogger(__name__)

_LENGTH_NAMES = ("model_max_length", "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""The first one takes precedence (Command R)."""
_STRETCHED = frozenset({"linear", "dynamic", "yarn"})
"""Scaling types whose factor multiplies the length in the config; with others, that length is already scaled."""
_STATED_SCALED = ("gemma3",)
"""Model types whose config states the scaled length although their scaling type is one of these."""


def max_model_len(wanted: int | None, text_config: Any) -> int:
    """The effective limit, in tokens. wanted: the engine argument. Raises ValueError naming it if the model allows
    less, or if neither it nor the config states a limit."""
    limit = _longest(text_config)
    if limit is None:
        if wanted is None:
            raise ValueError("engine argument 'max_model_len' is not set, and the model's config states no limit")
        return wanted
    if wanted is None:
        return _without_argument(limit, text_config)
    if wanted > limit:
        raise ValueError(f"engine argument 'max_model_len' is {wanted}, expected at most {limit}, the model's limit")
    return wanted


def fix_frequencies(model: nn.Module, length: int) -> None:
    """Sets the frequencies of the model's rotary modules to those for sequences of up to `length` tokens."""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        if isinstance(kinds, str) and kinds in ("longrope", "dynamic"):
            module.rope_type = "default"
            _fix(module, config, kinds, length, None)
        elif isinstance(kinds, dict):
            for layer_type, kind in list(kinds.items()):
                if kind in ("longrope", "dynamic"):
                    kinds[layer_type] = "default"
                    _fix(module, config, kind, length, layer_type)


def _fix(module: Any, config: Any, kind: str, length: int, layer_type: str | None) -> None:
    prefix = f"{layer_type}_" if layer_type else ""
    frequencies = getattr(module, f"{prefix}inv_freq")
    names = {"layer_type": layer_type} if layer_type else {}
    seq_len: int | None = length
    if kind == "dynamic":
        # vLLM uses the frequencies for the longest sequence that the model allows.
        seq_len = config.max_position_embeddings if length <= config.max_position_embeddings else _longest(config)
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, frequencies.device, seq_len=seq_len, **names)
    with torch.no_grad():
        frequencies.copy_(inv_freq)
    setattr(module, f"{prefix}attention_scaling", scaling)


def _longest(text_config: Any) -> int | None:
    """The longest sequence that the model allows, including scaling."""
    stated = (getattr(text_config, name, None) for name in _LENGTH_NAMES)
    limit = next((value for value in stated if isinstance(value, int)), None)
    if limit is None or str(getattr(text_config, "model_type", "")).startswith(_STATED_SCALED):
        return limit
    factor = 1.0
    for rope in _rope_parameters(text_config):
        if rope.get("rope_type") in _STRETCHED:
            factor = float(rope.get("factor") or 1.0)
        if rope.get("rope_type") == "yarn":
            limit = int(rope.get("original_max_position_embeddings") or limit)
    return int(limit * factor)


def _without_argument(limit: int, text_config: Any) -> int:
    """longrope's frequencies for long sequences make short ones worse, so only the argument enables them."""
    if any(rope.get("rope_type") == "longrope" for rope in _rope_parameters(text_config)):
        original = _original_length(text_config)
        if original and original < limit:
            logger.warning(
                "max_model_len is limited to %d of the model's %d tokens: longer sequences need other "
                "rotary frequencies (longrope), which affect all requests; set the engine argument 'max_model_len' to "
                "use them",
                original,
                limit,
            )
            return original
    return limit


def _original_length(text_config: Any) -> int | None:
    original = getattr(text_config, "original_max_position_embeddings", None)
    if original is None:
        ropes = _rope_parameters(text_config)
        original = next((rope.get("original_max_position_embeddings") for rope in ropes), None)
    return None if original is None else int(original)


def _rope_parameters(text_config: Any) -> Iterator[Mapping[str, Any]]:
    """A config has one set of rotary parameters, or one per layer type."""
    parameters = getattr(text_config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        if isinstance(value, Mapping) and "rope_type" in value:
            yield value


def restore_buffers(model: Any) -> None:
    """Restores, in a model without memory, what its files do not contain: rotary frequencies, the embedding's factor,
    and the factors of a recurrence's inputs (Falcon-H1)."""
    for module in list(model.modules()):
        if hasattr(module, "mup_vector"):
            from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector

            module.mup_vector = compute_mup_vector(model.config)
        for name, child in list(module.named_children()):
            if "rotary" in name and hasattr(child, "config"):
                setattr(module, name, type(child)(config=child.config))
    embedding = model.get_input_embeddings()
    for name, buffer in list(embedding.named_buffers(recurse=False)):
        factor = getattr(embedding, "scalar_embed_scale", embedding.weight.shape[1] ** 0.5)
        setattr(embedding, name, torch.full(buffer.shape, factor, dtype=buffer.dtype))
