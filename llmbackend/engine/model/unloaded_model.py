"""A checkpoint's model without its weights: whether it would load, how it would be computed, and what memory it needs.

Used by load_forecast.py. The model is built without memory for its matrices, and goes through the loader's own checks
and description; norms get real weights, because a description probes what they compute. Invariant: an error here is
raised by the loader too, with the same message; what only weights can tell (the logits) is left open.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import nn

from ..attention.interface import AttentionOptions, LayerShape
from ..config import EngineConfig
from ..cpu.linear import swap_linears
from ..cpu.native_memory import can_hold
from ..cpu.native_runner import why_modules
from ..errors import ProgramUnsupportedError
from ..kernels.choice import Choice
from ..kernels.library import NativeKernels
from ..kv_groups import LayerGroups, layer_groups
from .compatibility import architecture_name, check_calls, is_recurrent, needs_program
from .decoder_description import Decoder
from .hybrid_description import describe_any
from .int4_formats import Mxfp4Format, PackedFormat
from .latent_attention import headed_linears
from .loader import (
    OpenedCheckpoint,
    dtype_of,
    library_choice,
    open_checkpoint,
    random_model,
    stored_tensors,
    why_not_native,
)
from .native_experts import ExpertsToPack, packed_routers
from .rotary import fix_frequencies, restore_buffers
from .text_part import keep_text

logger = logging.getLogger(__name__)

_PROBED_TOKENS = 64
"""Positions at which rotary frequencies are compared."""
_CORRECTION = "correction_bias"
"""Suffix of the name of a router's correction."""
_EMBEDDING_ROWS = 2
"""Rows of an embedding from which its factor is measured."""


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """What can be known of a model without its weights."""

    architecture: str
    model_type: str
    dtype: str
    vocab_size: int
    max_model_len: int
    num_parameters: int
    weight_bytes: int
    """In memory, with linear layers packed if they would be, without embeddings that are looked up by row."""
    embedding_bytes: int
    kv_bytes_per_token: int | None
    """None = only the weights tell."""
    layers: LayerGroups | None
    """Which layers share KV blocks; None = only the weights tell, or all do."""
    state_bytes: int
    why_modules: str
    """Why a step would run the model's modules; "" = it would run a native program, or on an accelerator."""
    kernels: str
    """The native kernels that would be used, and what was measured; "" = none."""


class _Layout(NativeKernels):
    """Native kernels that place matrices but pack nothing."""

    def pack(self, *_arguments: Any) -> None:
        return None


def unloaded_model(config: EngineConfig) -> UnloadedModel:
    """Raises ValueError or OSError as `load_model` does."""
    transformers.utils.logging.disable_progress_bar()
    opened = open_checkpoint(config)
    if opened.tensors is not None:
        stored_tensors(config, opened, ())
    dtype = dtype_of(config, opened)
    model = meta_model(config, opened, dtype)
    attention = _attention_of(model)
    shapes, options = attention or ({}, {})
    choice = None if opened.dense else library_choice(config, dtype)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    weight_bytes = _weight_bytes(config, opened, model, choice)
    reason, decoder = ("", None) if opened.dense else _why_modules(config, model, attention, choice, dtype)
    if decoder is not None:
        shapes = decoder.shapes(shapes)
    if reason and is_recurrent(opened.hf_config):
        raise needs_program(opened.hf_config, reason)
    return UnloadedModel(
        architecture=architecture_name(opened.hf_config),
        model_type=str(opened.hf_config.model_type),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=int(opened.hf_config.get_text_config(decoder=True).vocab_size),
        max_model_len=opened.max_model_len,
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        embedding_bytes=_bytes(embedding) if choice is not None else 0,
        kv_bytes_per_token=sum(shape.bytes_per_token(dtype) for shape in shapes.values()) if attention else None,
        layers=_layer_groups(shapes, options, opened.max_model_len, decoder) if attention and not reason else None,
        state_bytes=0 if decoder is None else decoder.state_bytes,
        why_modules=reason,
        kernels="" if choice is None else choice.report,
    )


def meta_model(config: EngineConfig, opened: OpenedCheckpoint, dtype: torch.dtype) -> Any:
    """The model without memory. Raises ValueError."""
    model = random_model(config, opened.hf_config, dtype, torch.device("meta")).eval()
    if not isinstance(model.get_output_embeddings(), nn.Module):
        name = architecture_name(opened.hf_config)
        raise ValueError(f"model architecture '{name}' is not supported: it has no output head")
    keep_text(model)
    return model


_AttentionModules = tuple[Mapping[nn.Module, LayerShape], Mapping[nn.Module, AttentionOptions]]


def _attention_of(model: Any) -> _AttentionModules | None:
    """None if the model cannot be run without weights. Raises ValueError if it is unsupported."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # other implementations read values, or multiply only bfloat16
    try:
        recorder, _, _ = check_calls(model)
    except (RuntimeError, NotImplementedError) as error:  # an operation that needs values
        logger.info("the layers of %s cannot be determined without weights", type(model).__name__, exc_info=error)
        return None
    return recorder.shapes, recorder.options


def _layer_groups(
    shapes: Mapping[nn.Module, LayerShape], options: Mapping[nn.Module, AttentionOptions], max_model_len: int,
    decoder: Decoder | None,
) -> LayerGroups:  # fmt: skip
    """The groups of a program, as in PackedDecoder."""
    keeps_all = decoder is not None and decoder.state_bytes > 0
    windows = [0 if keeps_all else options[module].sliding_window or 0 for module in shapes]
    return layer_groups(windows, max_model_len, are_alike=len(set(shapes.values())) == 1)


def _weight_bytes(config: EngineConfig, opened: OpenedCheckpoint, model: Any, choice: Choice | None) -> int:
    """Packs linear layers, if they would be packed, in place."""
    if choice is None:
        linear = sum(each.weight.numel() for each in model.modules() if type(each) is nn.Linear)
        whole = sum(_bytes(parameter) for parameter in model.parameters())
        plain = next(model.parameters()).element_size()
        if opened.int4 is not None and opened.dense:
            return int(whole - _num_packed(model, opened.int4) * (plain - opened.int4.bytes_per_number))
        return int(whole - (linear * (plain - 1) if config.quantization else 0))
    asked: list[int] = []

    def new_memory(size_bytes: int) -> npt.NDArray[np.uint8]:
        asked.append(size_bytes)
        return np.zeros(1, np.uint8)

    kernels = _Layout(choice.library, 1)
    try:
        experts = ExpertsToPack(model, config.quantization)
        swap_linears(model, kernels, config.quantization, new_memory, None, experts, headed_linears(model))
    finally:
        kernels.close()
    elsewhere = [model.get_input_embeddings(), *(router for router, _ in packed_routers(model))]
    left_out = {id(module.weight) for module in elsewhere}
    others = (each for each in model.parameters() if each.dim() > 1 and id(each) not in left_out)
    return sum(asked) + sum(map(_bytes, others))


def _num_packed(model: Any, form: PackedFormat) -> int:
    """Number of weights stored in 4 bits."""
    if isinstance(form, Mxfp4Format):
        return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 3)
    head = model.get_output_embeddings()
    return sum(each.weight.numel() for each in model.modules() if type(each) is nn.Linear and each is not head)


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _why_modules(
    config: EngineConfig,
    model: Any,
    attention: _AttentionModules | None,
    choice: Choice | None,
    dtype: torch.dtype,
) -> tuple[str, Decoder | None]:
    """Why modules would run, and what a program would compute."""
    if reason := why_modules(config):
        return reason, None
    if choice is None:
        return why_not_native(config, dtype), None
    if attention is None:
        return "its layers cannot be determined without weights", None
    shapes, options = attention
    try:
        _give_values(model)
        fix_frequencies(model, _PROBED_TOKENS)
        decoder = describe_any(model, options, _PROBED_TOKENS)
    except ProgramUnsupportedError as error:
        return str(error), None
    kept = decoder.shapes(shapes).values()
    if not all(can_hold(each.key_dim, each.value_dim, config.block_size) for each in kept):
        return "its heads do not fit the native layout", None
    return "", decoder


@torch.no_grad()
def _give_values(model: Any) -> None:
    """Gives values to what a description probes: vectors, rotary frequencies, some rows of the embedding."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name.endswith(_CORRECTION):  # shows how it is used
                values = torch.linspace(0.0, 1.0, parameter.numel()).view(parameter.shape).to(parameter.dtype)
                setattr(module, name, nn.Parameter(values, requires_grad=False))
            elif parameter.dim() == 1:
                setattr(module, name, nn.Parameter(torch.ones(parameter.shape, dtype=parameter.dtype)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dim() == 1 and buffer.is_meta:  # shows how a router's correction is used
                most = 1.0 if name.endswith(_CORRECTION) else 0.0
                setattr(module, name, torch.linspace(0.0, most, len(buffer), dtype=buffer.dtype))
    for router, _ in packed_routers(model):
        router.weight = nn.Parameter(torch.randn(router.weight.shape).to(router.weight.dtype))
    embedding = model.get_input_embeddings()
    rows = torch.ones(_EMBEDDING_ROWS, embedding.weight.shape[1], dtype=embedding.weight.dtype)
    embedding.weight = nn.Parameter(rows)
    restore_buffers(model)
