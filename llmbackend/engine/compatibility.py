"""Can this engine run this model? Asked twice: of the config before weights are read, of the loaded model once.

For: the loader. Does not know: families by name; everything is read off the class, the config or two tiny forward
passes, so that a family nobody has tried is judged too. Invariant: a model that passes gives, in a flattened batch
through our attention function, the logits that it gives on its own; anything else would serve nonsense without an
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from .attention.interface import PAGED_ATTENTION, AttentionOptions, active_context
from .attention.kv_cache import LayerShape
from .attention.recorder import RecordingAttention

_SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ENCODER_TASKS = (
    "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice", "ForNextSentencePrediction",
)  # fmt: skip
_PROBE_LENS = [5, 3]


def unsupported(architecture: str, reason: str) -> ValueError:
    return ValueError(f"model architecture '{architecture}' is not supported: {reason}")


def architecture_name(config: Any) -> str:
    """The class name that the checkpoint states, else its model type."""
    names = getattr(config, "architectures", None)
    return str(names[0]) if names else str(config.model_type)


def check_config(config: Any) -> None:
    """Raises ValueError naming the architecture and the reason. Reads no weights."""
    name = architecture_name(config)
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(name, "it is an encoder-decoder, and the engine runs decoder-only models")
    if name.endswith(_ENCODER_TASKS):
        raise unsupported(name, "it is an encoder, and the engine generates text with decoder-only models")
    model_class = causal_lm_class(config)
    text_config = config.get_text_config(decoder=True)
    layer_types = {str(kind) for kind in getattr(text_config, "layer_types", None) or ()}
    if model_class is not None:
        has_only_attention = bool(layer_types) and layer_types <= _SUPPORTED_LAYER_TYPES
        if getattr(model_class, "_is_stateful", False) and not has_only_attention:
            raise unsupported(name, "it keeps a recurrent state per sequence, which paged KV memory cannot hold")
        if not model_class._can_set_attn_implementation():
            raise unsupported(name, "its attention does not go through transformers' attention interface")
    elif not getattr(config, "auto_map", None):
        raise unsupported(name, "transformers has no causal language model of this kind")
    if unknown := sorted(layer_types - _SUPPORTED_LAYER_TYPES):
        raise unsupported(name, f"its layers of type {', '.join(unknown)} are not plain or sliding-window attention")


def causal_lm_class(config: Any) -> Any | None:
    """The class of transformers that computes this config's text; None: it has none of its own for it."""
    return auto_class(config)._model_mapping.get(type(config), None)


def auto_class(config: Any) -> Any:
    """Whose from_pretrained loads this config's text. A model for images and text without a class for text alone is
    loaded as a whole, and given text."""
    if type(config) in AutoModelForCausalLM._model_mapping or not hasattr(config, "text_config"):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """What the check saw. shapes and options: by attention module, in the order of the layers. sequences: the token ids
    of the probes; logits: of all their tokens [tokens, vocab], computed one sequence at a time."""

    shapes: Mapping[nn.Module, LayerShape]
    options: Mapping[nn.Module, AttentionOptions]
    sequences: tuple[torch.Tensor, ...]
    logits: torch.Tensor

    def difference(self, logits: torch.Tensor) -> str:
        """How the same tokens' logits from elsewhere differ by more than rounding, or ""."""
        scale = self.logits.abs().max().item()
        tolerance = scale * (1e-3 if self.logits.dtype == torch.float32 else 8e-2)
        difference = (logits.float() - self.logits.float()).abs().max().item()
        return "" if difference <= tolerance else f"by {difference:.3g} (of {scale:.3g})"


@torch.inference_mode()
def check_model(model: Any) -> CheckedModel:
    """Runs two short sequences flattened into one batch, and one at a time with transformers' own attention.

    Raises ValueError as check_config does.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    device = next(model.parameters()).device
    tokens = torch.arange(1, sum(_PROBE_LENS) + 1, device=device) * 7 % min(int(config.vocab_size), 1009)
    sequences = torch.split(tokens, _PROBE_LENS)
    recorder = RecordingAttention(_PROBE_LENS)
    with active_context(recorder):
        flattened = _logits(model, sequences)
    _check_calls(name, config, recorder)
    checked = CheckedModel(recorder.shapes, recorder.options, sequences, _own_logits(model, sequences))
    if difference := checked.difference(flattened):
        raise unsupported(
            name, f"logits of a flattened batch differ from its own {difference}; it would compute nonsense"
        )
    return checked


def _check_calls(name: str, config: Any, recorder: RecordingAttention) -> None:
    expected_calls = int(config.num_hidden_layers)
    if len(recorder.calls) != expected_calls or len(recorder.shapes) != expected_calls:
        raise unsupported(
            name,
            f"its {expected_calls} layers called transformers' attention interface {len(recorder.calls)} times, "
            f"from {len(recorder.shapes)} layers, expected once per layer",
        )
    if recorder.problems:
        raise unsupported(name, recorder.problems[0])
    sliding = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    if sliding and sum(sliding) != recorder.num_sliding_layers:
        raise unsupported(name, "its sliding windows are not passed to the attention function")


def _own_logits(model: Any, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    try:
        return torch.cat([_logits(model, [sequence]) for sequence in sequences])
    finally:
        model.set_attn_implementation(PAGED_ATTENTION)


def _logits(model: Any, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """All logits [tokens, vocab] of the sequences flattened into one batch."""
    positions = torch.cat([torch.arange(len(sequence), device=sequence.device) for sequence in sequences])
    output = model(input_ids=torch.cat(list(sequences))[None], position_ids=positions[None], use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits
