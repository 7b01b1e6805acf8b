"""From a checkpoint to a rank's part of its model.

For: every rank, before it meets the others. Does not know: processes, steps. Invariants: a rank reads only its part of
plain weights, and quantises what it cut out; weights that the checkpoint holds in 8 bits or less, or that are drawn at
random, are made whole in host memory, cut, and freed before the program is built; what the program is made of has been
compared with the model's own modules, as a small model of the same config (`model/trial.py`) where the weights are
never in one place.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace

import msgspec
import torch
from torch import nn

from ...config import EngineConfig
from ...errors import ProgramUnsupportedError
from ...model.compatibility import MAX_PROBE_TOKENS
from ...model.loader import LoadedModel, load_model
from ...model.stored_model import open_stored_model
from ...model.trial import trial_of
from ...start import lean_imports
from .. import device_kv_memory as kv_memory
from ..device import check_gpu, use_gpu
from ..make_gpu_runner import choose
from ..program import GpuProgram
from ..triton_needs import naming_what_triton_needs
from ..weights.dense import QuantizedLinear, check_device
from ..weights.experts import QuantizedExperts
from ..weights.stored import StoredLinear
from .collectives import RankPlace, Ranks
from .sharding import Sharding

logger = logging.getLogger(__name__)


def refusal(config: EngineConfig, why: str) -> ValueError:
    return ValueError(f"{config.split}, which the model does not support: {why}")


def load_part(config: EngineConfig, ranks: Ranks, is_alone: bool = False) -> LoadedModel:
    """is_alone: the other ranks are on other machines. Raises ValueError or OSError with a text for the user, and
    torch.OutOfMemoryError."""
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
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // config.num_ranks, 1))


def _open(config: EngineConfig, device: torch.device) -> LoadedModel:
    """The whole model: in its files, or in host memory."""
    loaded = _open_files(config) or load_model(msgspec.structs.replace(config, device="cpu"), dense=True)
    if config.quantization is not None:
        check_device(config.quantization, device, loaded.dtype)
    return loaded


def _open_files(config: EngineConfig) -> LoadedModel | None:
    """None: there are no files, or they must be read whole."""
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
    """Frees the weights of the whole model. From now on its modules are only the keys of the layers' KV memory."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            del module.quantized
        elif isinstance(module, QuantizedExperts):
            module.drop_weights()
        elif isinstance(module, StoredLinear):
            del module.stored
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
