"""A model whose weights stay in the checkpoint's files, described as the loader describes one that it has read.

For: the ranks of a split model, each of which cuts its part out of the files. Does not know: ranks, devices, programs.
The model is built without memory; norms, biases and rotary frequencies are read, matrices are mapped. Invariants: what
the loader refuses before it reads weights is refused here with the same text; what a description reads of a module is
real. What its logits would show is left to `trial.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig

from ..attention.interface import AttentionOptions
from ..config import EngineConfig
from ..errors import CheckpointError, ProgramUnsupportedError
from ..gpu.weights.dense import Quantization, is_quantizable
from ..gpu.weights.stored import StoredLinear, StoredWeight
from .checkpoint_files import bad_checkpoint, read_headers
from .compatibility import CheckedModel, architecture_name, check_calls
from .loader import (
    LoadedModel,
    OpenedCheckpoint,
    check_stored_tensors,
    describe_or_why,
    dtype_of,
    eos_token_ids,
    files_of,
    open_checkpoint,
)
from .mapped_tensors import mapped_tensors
from .rotary import fix_frequencies, restore_buffers
from .unloaded_model import meta_model

logger = logging.getLogger(__name__)


def open_stored_model(config: EngineConfig) -> LoadedModel:
    """Raises ValueError or OSError with a text for the user, and ProgramUnsupportedError for a checkpoint that must be
    read whole."""
    transformers.utils.logging.disable_progress_bar()
    opened = open_checkpoint(config, dense=True)
    if opened.int4 is not None:
        raise ProgramUnsupportedError("its weights are in 4 bits")
    files = files_of(config)
    _check(config, opened, files)
    dtype = dtype_of(config, opened)
    model = meta_model(config, opened, dtype)
    try:
        recorder, _, _ = check_calls(model)
    except (RuntimeError, NotImplementedError) as error:  # an operation that needs values
        raise ProgramUnsupportedError("its layers are not known without weights") from error
    names = {id(parameter): name for name, parameter in _parameters(model)}
    try:
        _take_tensors(model, mapped_tensors(files), dtype, config.quantization)
    except (SafetensorError, OSError) as error:
        raise bad_checkpoint(config.model, error) from error
    restore_buffers(model)
    fix_frequencies(model, opened.max_model_len)
    with contextlib.suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(config.model)
    options = {module: _with_values(each, names, model) for module, each in recorder.options.items()}
    decoder, why_modules = describe_or_why(model, options, opened.max_model_len, with_experts=True)
    return LoadedModel(
        model=model,
        layer_shapes=recorder.shapes,
        dtype=dtype,
        device=torch.device("cpu"),
        vocab_size=int(opened.hf_config.get_text_config(decoder=True).vocab_size),
        max_model_len=opened.max_model_len,
        eos_token_ids=eos_token_ids(model, opened.hf_config),
        model_type=str(opened.hf_config.model_type),
        linear_kind="torch",
        checked=CheckedModel(recorder.shapes, options, (), torch.empty(0)),
        kernels=None,
        store=None,
        decoder=decoder,
        why_modules=why_modules,
        adapters=None,
    )


def _check(config: EngineConfig, opened: OpenedCheckpoint, files: list[Path]) -> None:
    """As the loader."""
    try:
        tensors = read_headers(files) if opened.tensors is None else opened.tensors
        check_stored_tensors(config, opened, tensors)
    except CheckpointError as error:
        raise bad_checkpoint(config.model, error) from error


@torch.no_grad()
def _take_tensors(
    model: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, quantization: Quantization | None
) -> None:
    """Gives the model's modules the tensors: vectors in its type, matrices as they are."""
    tied = {name for name, _ in _parameters(model)} - tensors.keys()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    unknown = [name for name in tied if not (is_tied and _owner(model, name) is head)]
    if unknown or any(tensors[name].shape != each.shape for name, each in _parameters(model) if name in tensors):
        name = architecture_name(model.config)
        raise ProgramUnsupportedError(f"the tensors of its files are not those of {name}")
    for name, parameter in list(_parameters(model)):
        module, attribute = _owner(model, name), name.rpartition(".")[2]
        if name in tensors:
            tensor = tensors[name].to(dtype) if parameter.dim() == 1 else tensors[name]
            setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))
    if is_tied:
        head.weight = embedding.weight
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                bias = cast("nn.Parameter | None", child.bias)
                kind = quantization if is_quantizable(name, child, head) else None
                setattr(parent, name, StoredLinear(StoredWeight((child.weight.detach(),), dtype, kind), bias))


def _with_values(options: AttentionOptions, names: Mapping[int, str], model: nn.Module) -> AttentionOptions:
    """What a layer asked for while it had no memory. names: of its parameters then. Raises ProgramUnsupportedError."""
    if options.sinks is None:
        return options
    if id(options.sinks) not in names:
        raise ProgramUnsupportedError("its attention sinks are not known without weights")
    return replace(options, sinks=model.get_parameter(names[id(options.sinks)]))


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are shared by two modules twice."""
    return model.named_parameters(remove_duplicate=False)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
