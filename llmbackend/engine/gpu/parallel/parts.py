"""From a checkpoint to a rank's part of its model.

Used by every rank, before it joins the others. Invariants: a rank reads only its part of dense weights, and quantises
only that; weights that the checkpoint stores in 8 bits or less, or that are random, are created whole in host memory,
split, and freed before the program is built; the operations of the program are compared with the model's own modules in
a small model of the same config (`trial_of`), since the weights are never all in one place. What the loader refuses
before it reads weights is refused here with the same message.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig

from ...attention.interface import AttentionOptions
from ...config import EngineConfig
from ...cpu_threads import usable_cpus
from ...errors import ProgramUnsupportedError
from ...model import lean_imports
from ...model.checkpoint_files import bad_checkpoint
from ...model.compatibility import MAX_PROBE_TOKENS, CheckedModel, architecture_name, check_calls, check_model
from ...model.decoder_description import Attention, Decoder
from ...model.loader import (
    LoadedModel,
    describe_or_why,
    dtype_of,
    eos_token_ids,
    load_model,
    open_checkpoint,
    random_model,
    stored_tensors,
)
from ...model.located_files import files_of
from ...model.rotary import fix_frequencies, restore_buffers
from ...model.unloaded_model import meta_model
from .. import device_kv_memory as kv_memory
from ..device import check_gpu, use_gpu
from ..make_gpu_runner import choose
from ..program import GpuProgram
from ..triton_needs import naming_what_triton_needs
from ..weights.dense import Quantization, QuantizedLinear, check_device, is_quantizable, join_neighbours
from ..weights.experts import QuantizedExperts
from ..weights.stored import StoredLinear, StoredWeight, mapped_tensors
from .collectives import RankPlace, Ranks
from .sharding import Sharding

logger = logging.getLogger(__name__)


def refusal(config: EngineConfig, why: str) -> ValueError:
    return ValueError(f"{config.split}, which the model does not support: {why}")


def load_part(config: EngineConfig, ranks: Ranks, is_alone: bool = False) -> LoadedModel:
    """is_alone: whether the other ranks are on other machines. Raises ValueError or OSError with a message for the
    user, or torch.OutOfMemoryError."""
    device = _device_of(config, ranks.place, is_alone)
    _set_threads(config, is_alone)
    lean = lean_imports.without_compiler() if device.type == "cpu" else contextlib.nullcontext()
    with lean:
        whole = _open(config, device)
        if whole.decoder is None:
            raise refusal(config, whole.why_modules)
        sharding = Sharding(ranks.of_stage, device, whole.dtype, ranks.place, is_exact=device.type == "cpu")
        part = replace(
            whole,
            decoder=sharding.decoder(whole.decoder, whole.layer_shapes),
            layer_shapes=sharding.layer_shapes(whole.layer_shapes),
            device=device,
            checked=replace(whole.checked, sequences=(), logits=torch.empty(0)),
        )
        if ranks.place.rank == 0:
            with contextlib.nullcontext() if device.type == "cpu" else naming_what_triton_needs():
                _try_small(config, whole, part)
    _drop_weights(whole.model)
    return part


def _device_of(config: EngineConfig, place: RankPlace, is_alone: bool) -> torch.device:
    """Raises ValueError."""
    first = torch.device(config.device)
    if first.type != "cuda":
        return first
    check_gpu(first)
    device = torch.device("cuda", (first.index or 0) + (0 if is_alone else place.rank))
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{config.split}, from device '{config.device}' on, but this torch ({torch.__version__}) sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return use_gpu(device)


def _set_threads(config: EngineConfig, is_alone: bool) -> None:
    """Ranks on one machine share its cores."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    elif not is_alone:
        torch.set_num_threads(max(usable_cpus() // config.num_ranks, 1))


def _open(config: EngineConfig, device: torch.device) -> LoadedModel:
    """The whole model, in its files or in host memory."""
    loaded = _open_files(config) or load_model(msgspec.structs.replace(config, device="cpu"), dense=True)
    if config.eight_bits is not None:
        check_device(config.eight_bits, device, loaded.dtype)
    return loaded


def _open_files(config: EngineConfig) -> LoadedModel | None:
    """None = there are no files, or they must be read whole."""
    if config.load_format != "safetensors":
        return None
    try:
        return open_stored_model(config)
    except ProgramUnsupportedError as reason:
        logger.warning("every rank reads the whole checkpoint: %s", reason)
        return None


def _try_small(config: EngineConfig, whole: LoadedModel, part: LoadedModel) -> None:
    """Compares the program of a small model with its modules, on this rank's device. Raises ValueError."""
    try:
        trial = trial_of(config, whole, part.device)
        assert trial.decoder is not None
        num_blocks = -(-MAX_PROBE_TOKENS // config.block_size)
        caches = kv_memory.kv_caches(trial.layer_shapes, num_blocks, config.block_size, trial.dtype, trial.device)
        ops, matmul, _ = choose(config, trial)
        program = GpuProgram(trial.decoder, caches, ops, MAX_PROBE_TOKENS, MAX_PROBE_TOKENS, matmul)
        program.verify(trial.checked, config.block_size)
    except ProgramUnsupportedError as reason:
        raise refusal(config, str(reason)) from reason


def _drop_weights(model: nn.Module) -> None:
    """Frees the weights of the whole model. Its modules remain as keys of the layers' KV memory."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            del module.quantized
        elif isinstance(module, QuantizedExperts):
            module.drop_weights()
        elif isinstance(module, StoredLinear):
            del module.stored
    for parameter in model.parameters():
        parameter.data = torch.empty(0)


def open_stored_model(config: EngineConfig) -> LoadedModel:
    """Raises ValueError or OSError with a message for the user, or ProgramUnsupportedError for a checkpoint that must
    be read whole."""
    transformers.utils.logging.disable_progress_bar()
    opened = open_checkpoint(config, dense=True)
    if opened.int4 is not None:
        raise ProgramUnsupportedError("its weights are in 4 bits")
    if opened.is_gguf:
        raise ProgramUnsupportedError("its weights are in a GGUF file")
    files = files_of(config)
    stored_tensors(config, opened, files)
    dtype = dtype_of(config, opened)
    model = meta_model(config, opened, dtype)
    try:
        recorder, _, _ = check_calls(model)
    except (RuntimeError, NotImplementedError) as error:  # an operation needs values
        raise ProgramUnsupportedError("its layers cannot be determined without weights") from error
    names = {id(parameter): name for name, parameter in _parameters(model)}
    try:
        _take_tensors(model, mapped_tensors(files), dtype, config.eight_bits)
    except (SafetensorError, OSError) as error:
        raise bad_checkpoint(config.model, error) from error
    restore_buffers(model)
    fix_frequencies(model, opened.max_model_len)
    with contextlib.suppress(OSError):  # there is none
        model.generation_config = GenerationConfig.from_pretrained(config.model)
    options = {module: _with_values(each, names, model) for module, each in recorder.options.items()}
    decoder, why_modules = describe_or_why(model, options, opened.max_model_len, for_accelerator=True)
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
        decoder=decoder,
        why_modules=why_modules,
    )


@torch.no_grad()
def _take_tensors(
    model: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, quantization: Quantization | None
) -> None:
    """Assigns the tensors to the modules of the model: vectors in its dtype, matrices unchanged."""
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
    """The options of a layer that was called without memory. names: of its parameters at that time. Raises
    ProgramUnsupportedError."""
    if options.sinks is None:
        return options
    if id(options.sinks) not in names:
        raise ProgramUnsupportedError("its attention sinks cannot be determined without weights")
    return replace(options, sinks=model.get_parameter(names[id(options.sinks)]))


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Shared parameters are repeated."""
    return model.named_parameters(remove_duplicate=False)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


MIN_LAYERS = 2
VOCAB_SIZE = 128
_ROUNDING = 1e-2
"""Relative rounding error of a factor measured in the model's dtype."""


def trial_of(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> LoadedModel:
    """A small model of the same kind on the device, checked and described. loaded: the real one, not split.

    Raises ValueError for an unsupported model, ProgramUnsupportedError if the description of the small model differs
    from that of the real one.
    """
    assert loaded.decoder is not None
    hf_config = _small(open_checkpoint(config, dense=True).hf_config)
    model = random_model(config, hf_config, loaded.dtype, device).eval()
    fix_frequencies(model, loaded.max_model_len)
    _spread(model, config.seed)
    join_neighbours(model)
    checked = check_model(model)
    decoder, why_modules = describe_or_why(model, checked.options, loaded.max_model_len, for_accelerator=True)
    if decoder is None:
        raise ProgramUnsupportedError(why_modules)
    _compare(decoder, loaded.decoder)
    return replace(
        loaded,
        model=model,
        layer_shapes=checked.shapes,
        device=device,
        vocab_size=VOCAB_SIZE,
        checked=checked,
        decoder=decoder,
    )


def _small(hf_config: Any) -> Any:
    hf_config = copy.deepcopy(hf_config)
    text_config = hf_config.get_text_config(decoder=True)
    kinds = list(getattr(text_config, "layer_types", None) or ())
    last_new = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    text_config.num_hidden_layers = min(max(last_new, MIN_LAYERS), int(text_config.num_hidden_layers))
    if kinds:
        text_config.layer_types = kinds[: text_config.num_hidden_layers]
    text_config.vocab_size = min(VOCAB_SIZE, int(text_config.vocab_size))
    text_config.pad_token_id = text_config.bos_token_id = text_config.eos_token_id = None
    return hf_config


@torch.no_grad()
def _spread(model: torch.nn.Module, seed: int) -> None:
    """Fills it with random numbers large enough for every part of a layer to show in the logits."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        numbers = torch.randn(parameter.shape, generator=draw)
        if parameter.dim() == 1:
            parameter.add_((0.3 * numbers).to(parameter))
        else:
            parameter.copy_(numbers / parameter.shape[-1] ** 0.5)


def _compare(small: Decoder, real: Decoder) -> None:
    """Compares the values that no file contains; they are wrong if a module built without memory was completed
    wrongly."""
    pairs = zip(small.layers, real.layers, strict=False)
    factors = math.isclose(small.embedding_factor, real.embedding_factor, rel_tol=_ROUNDING)
    if not factors or not all(_same_rotation(a.attending, b.attending) for a, b in pairs):
        raise ProgramUnsupportedError("its description without weights differs from that of its modules")


def _same_rotation(small: Attention, real: Attention) -> bool:
    if small.cos_sin is None or real.cos_sin is None:
        return small.cos_sin is real.cos_sin
    return torch.equal(small.cos_sin.cpu(), real.cos_sin)
