"""Whether this engine can run a model: checks its config before weights are read, and the loaded model once.

Used by the loader; knows no family by name. Everything is read off the class, the config or two tiny forward passes, so
unknown families are judged too. Invariant: a model that passes gives the same logits in a flattened batch through our
attention function as on its own; any other would silently produce wrong output.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ..attention import own_attention
from ..attention.interface import PAGED_ATTENTION, AttentionOptions, LayerShape, active_context, noted_mask_windows
from ..attention.reference import grouped_attention
from ..errors import ProgramUnsupportedError
from .rotary import max_model_len
from .sparse_attention import sparse_layer_types, why_not_all

_ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_HYBRID = "hybrid"
"""Attention and a recurrent module in parallel."""
_RECURRENT_LAYER_TYPES = frozenset({"conv", "linear_attention", _HYBRID})
_BESIDE_RECURRENT = frozenset({"mlp", "moe"})
"""Layers consisting only of these, in models with recurrent layers."""
_SUPPORTED_LAYER_TYPES = _ATTENTION_LAYER_TYPES | _RECURRENT_LAYER_TYPES
_ENCODER_TASKS = (
    "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice", "ForNextSentencePrediction",
)  # fmt: skip
_PROBE_LENS = [5, 3]
_MAX_QUANTIZED_ERROR = {"int8": 0.25, "int4": 0.25, "fp8": 0.4}
"""Rounding to 8 bits flips with the last bit of its input, so two programs of one model in 8 bits agree no better than
each agrees with the float model: SmolLM2-135M in int8 8 %; 32 layers of random weights on an H100 19 % in int8, 33 % in
fp8. A wrong program is off by 50 % and more. Programs with 4-bit weights are compared with modules with the same
weights."""
_MAX_ROUNDING_ERROR = 0.08
"""RMS error for 16 bits, if the largest difference exceeds its own limit: SmolLM2-135M rounded to the nearest 4 bits is
off by 6 %."""
_MAX_EXPERTS_ERROR = 0.25
_MAX_QUANTIZED_EXPERTS_ERROR = 0.4
"""RMS errors for 16 bits, and for 8 or 4, if rounding may select other experts for a token."""
MAX_PROBE_TOKENS = 8
"""Minimum tokens and samples per step for a program to be verified."""


def unsupported(architecture: str, reason: str) -> ValueError:
    return ValueError(f"model architecture '{architecture}' is not supported: {reason}")


def needs_program(config: Any, reason: str) -> ValueError:
    """For a model with recurrent layers that cannot run as a native program. reason: why."""
    text = (
        f"its recurrent layers keep a state per sequence, which only a native program on a CPU supports, and {reason}"
    )
    return unsupported(architecture_name(config), text)


def architecture_name(config: Any) -> str:
    """The class name stated in the checkpoint, else its model type."""
    names = getattr(config, "architectures", None)
    return str(names[0]) if names else str(config.model_type)


def layer_types(config: Any) -> list[str]:
    """The type of each layer of the text model, as stated in its config; empty if it does not."""
    return [str(kind) for kind in getattr(config.get_text_config(decoder=True), "layer_types", None) or ()]


def is_recurrent(config: Any) -> bool:
    """Whether some layers keep a fixed-size state per sequence, of a kind that programs support."""
    return not _RECURRENT_LAYER_TYPES.isdisjoint(layer_types(config))


def _attends(kind: str) -> bool:
    return kind in _ATTENTION_LAYER_TYPES or kind == _HYBRID


def check_config(config: Any) -> None:
    """Raises ValueError naming the architecture and the reason. Reads no weights."""
    name = architecture_name(config)
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(name, "it is an encoder-decoder, and the engine runs decoder-only models")
    if name.endswith(_ENCODER_TASKS):
        raise unsupported(name, "it is an encoder, and the engine generates text with decoder-only models")
    model_class = causal_lm_class(config)
    kinds = set(layer_types(config)) - sparse_layer_types(config)
    if is_recurrent(config):
        kinds -= _BESIDE_RECURRENT
    if model_class is not None:
        is_known = bool(kinds) and kinds <= _SUPPORTED_LAYER_TYPES
        if getattr(model_class, "_is_stateful", False) and not is_known:
            raise unsupported(name, "it keeps a recurrent state per sequence, which paged KV memory cannot hold")
        own_attention.lead_to_interface(model_class)
        if not _calls_attention_interface(model_class):
            raise unsupported(name, "its attention does not go through transformers' attention interface")
    elif not getattr(config, "auto_map", None):
        raise unsupported(name, "transformers has no causal language model of this kind")
    if unknown := sorted(kinds - _SUPPORTED_LAYER_TYPES):
        raise unsupported(name, f"its layers of type {', '.join(unknown)} are not plain or sliding-window attention")


def checked_length(config: Any, wanted: int | None) -> int:
    """The effective limit in tokens. wanted: the engine argument max_model_len. Raises ValueError if the model allows
    less, or if its attention is plain only in shorter sequences."""
    length = max_model_len(wanted, config.get_text_config(decoder=True))
    if reason := why_not_all(config, length):
        raise unsupported(architecture_name(config), reason)
    return length


def _calls_attention_interface(model_class: Any) -> bool:
    """Older code selects its attention from its own table."""
    tables = own_attention.tables_of(model_class)
    return bool(model_class._can_set_attn_implementation()) and all(PAGED_ATTENTION in table for table in tables)


def causal_lm_class(config: Any) -> Any | None:
    """The transformers class that computes this config's text; None = it has none of its own."""
    return auto_class(config)._model_mapping.get(type(config), None)


def auto_class(config: Any) -> Any:
    """The Auto class that loads this config's text model. A multimodal model without a separate text class is loaded as
    a whole, and given text."""
    if type(config) in AutoModelForCausalLM._model_mapping or not hasattr(config, "text_config"):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """The findings of the check of a loaded model."""

    shapes: Mapping[nn.Module, LayerShape]
    """By attention module, in the order of the layers."""
    options: Mapping[nn.Module, AttentionOptions]
    """What each attention module requested, in the same order."""
    sequences: tuple[torch.Tensor, ...]
    """Token ids of the probes, int64 [tokens] each; empty = the model's own logits are unknown, so programs are not
    compared with them."""
    logits: torch.Tensor
    """Of all tokens of the probes [tokens, vocab], computed one sequence at a time."""
    quantization: str | None = None
    """Quantisation of the weights that compute the logits to compare: "int8", "int4", "fp8" or none."""
    has_experts: bool = False

    def difference(self, logits: torch.Tensor) -> str:
        """By how much logits of the same tokens, computed differently, deviate beyond rounding; "" = they do not."""
        if self.quantization is not None:
            error = _relative_rms_error(logits.float(), self.logits.float())
            most = _MAX_QUANTIZED_EXPERTS_ERROR if self.has_experts else _MAX_QUANTIZED_ERROR[self.quantization]
            return "" if error <= most else f"by {error * 100:.0f} %"
        scale, is_exact = self.logits.abs().max().item(), self.logits.dtype == torch.float32
        difference = (logits.float() - self.logits.float()).abs().max().item()
        if difference <= scale * (1e-3 if is_exact else 8e-2):
            return ""
        most = _MAX_EXPERTS_ERROR if self.has_experts else _MAX_ROUNDING_ERROR
        if not is_exact and _relative_rms_error(logits.float(), self.logits.float()) <= most:
            return ""
        return f"by {difference:.3g} (of {scale:.3g})"

    def verify(self, program: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compares a program with the model's own modules. program: maps a sequence's token ids [tokens] to the logits
        of all its tokens [tokens, vocab]. Raises ProgramUnsupportedError."""
        if not self.sequences:
            return
        logits = torch.cat([program(token_ids) for token_ids in self.sequences])
        if difference := self.difference(logits):
            raise ProgramUnsupportedError(f"the program's logits differ from the modules' {difference}")

    @torch.inference_mode()
    def verify_quantized_modules(self, model: Any) -> None:
        """Compares the model, now with quantised linear layers, with the original. Raises ValueError."""
        _, _, flattened = check_calls(model)
        if difference := self.difference(flattened):
            reason = (
                f"with {self.quantization} weights its logits differ {difference} (RMS) from those of its own weights"
            )
            raise unsupported(type(model).__name__, reason)


def _relative_rms_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """For logits [tokens, vocab], ignoring constants added to all logits of a token, which change no probability."""
    logits, expected = (each - each.mean(-1, keepdim=True) for each in (logits, expected))
    return float((logits - expected).norm() / expected.norm())


@torch.inference_mode()
def check_model(model: Any, quantization: str | None = None) -> CheckedModel:
    """Runs two short sequences flattened into one batch, and one at a time with transformers' own attention.
    quantization: of its linear layers, as in CheckedModel.

    Raises ValueError as check_config does.
    """
    name = type(model).__name__
    recorder, sequences, flattened = check_calls(model)
    has_experts = any(hasattr(module, "experts") for module in model.modules())
    checked = CheckedModel(
        recorder.shapes, recorder.options, sequences, _own_logits(model, sequences), quantization, has_experts
    )
    if difference := checked.difference(flattened):
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise unsupported(name, "it computes positions itself, which fails for several sequences in a batch")
        raise unsupported(
            name, f"logits of a flattened batch differ from its own {difference}; its output would be wrong"
        )
    return checked


def check_calls(model: Any) -> tuple[RecordingAttention, tuple[torch.Tensor, ...], torch.Tensor]:
    """What the model's layers request from attention, the probes' tokens, and the logits of their flattened batch.
    Works on a model without memory for weights, which has no logits. Raises ValueError as check_config does."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    device = next(model.parameters()).device
    tokens = torch.arange(1, sum(_PROBE_LENS) + 1, device=device) * 7 % min(int(config.vocab_size), 1009)
    sequences = torch.split(tokens, _PROBE_LENS)
    # In a flattened batch, modules with recurrent layers would treat one sequence as another's continuation.
    batches = [[sequence] for sequence in sequences] if is_recurrent(config) else [list(sequences)]
    logits = []
    for batch in batches:
        recorder = RecordingAttention([len(sequence) for sequence in batch])
        with noted_mask_windows() as windows, active_context(recorder):
            logits.append(_flattened_logits(model, batch))
        _check_calls(name, config, recorder, windows)
    return recorder, sequences, torch.cat(logits)


def _flattened_logits(model: Any, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """All logits of the sequences in one batch; the model's code may not support that. Raises ValueError as
    check_config does."""
    try:
        return _logits(model, batch, _positions(batch))
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or next(model.parameters()).is_meta:
            raise
        reason = f"its modules cannot run several sequences in a batch ({type(error).__name__}: {error})"
        raise unsupported(type(model).__name__, reason) from error


def _check_calls(name: str, config: Any, recorder: RecordingAttention, mask_windows: set[int]) -> None:
    expected_calls = int(config.num_hidden_layers)
    if is_recurrent(config):
        expected_calls = sum(map(_attends, layer_types(config)))
    if len(recorder.calls) != expected_calls or len(recorder.shapes) != expected_calls:
        raise unsupported(
            name,
            f"its {expected_calls} layers called transformers' attention interface {len(recorder.calls)} times, "
            f"from {len(recorder.shapes)} layers, expected once per layer",
        )
    if recorder.problems:
        raise unsupported(name, recorder.problems[0])
    sliding = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    length = getattr(config, "max_position_embeddings", None) or math.inf
    if sliding:
        is_passed = sum(sliding) == recorder.num_sliding_layers
    else:
        is_passed = recorder.num_sliding_layers > 0 or all(window >= length for window in mask_windows)
    if not is_passed:
        raise unsupported(name, "its sliding windows are not passed to the attention function")


def _own_logits(model: Any, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    model.set_attn_implementation(own_attention.implementation_of(model.config))
    try:
        return torch.cat([_logits(model, [sequence], None) for sequence in sequences])
    finally:
        model.set_attn_implementation(PAGED_ATTENTION)


def _positions(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.arange(len(sequence), device=sequence.device) for sequence in sequences])[None]


def _logits(model: Any, sequences: Sequence[torch.Tensor], positions: torch.Tensor | None) -> torch.Tensor:
    """All logits [tokens, vocab] of the sequences flattened into one batch. positions: None = the model's own."""
    input_ids = torch.cat(list(sequences))[None]
    # Without a mask, transformers reads the values of the positions, which a meta tensor lacks, and for recurrent
    # layers those of a mask.
    mask: torch.Tensor | dict[str, None] | None = torch.ones_like(input_ids) if input_ids.is_meta else None
    if mask is not None and is_recurrent(model.config):
        attends = any(map(_attends, layer_types(model.config)))
        mask = dict.fromkeys((*layer_types(model.config), "full_attention", "linear_attention")) if attends else None
    output = model(input_ids=input_ids, position_ids=positions, attention_mask=mask, use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits.to(model.get_input_embeddings().weight.dtype)  # some models widen values that they rounded before


# Tensors that layers pass along but that do not affect attention.
_HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "input_ids"})


class RecordingAttention:
    """Attention without a cache that records what a model requests: each sequence of the flattened batch on its own.

    shapes, options: one entry for each layer that called. problems: what a paged backend cannot do.
    """

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
            self.problems.append("a layer passes its own attention mask")
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
    return grouped_attention(q, k, v, visible[None], options, -distance[None].float())[0].transpose(0, 1)
