"""What a rank computes with: its part of the model, on its device, read from the model's files.

For: start.py, on each rank, before the ranks meet. Does not know: processes, steps. Invariants: the whole model is in
host memory only; when this returns nothing is left of what other ranks have; whatever a rank cannot have is refused by
name, before anybody waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

import msgspec
import torch
from torch import nn

from ...config import EngineConfig
from ...loader import LoadedModel, load_model
from ...process import lean_imports
from ..quantized_weights import QuantizedLinear, check_device
from .collectives import ProcessGroup
from .sharding import Sharding


def _device_of(config: EngineConfig, rank: int) -> torch.device:
    first = torch.device(config.device)
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


def refusal(config: EngineConfig, why: str) -> ValueError:
    size = config.tensor_parallel_size
    return ValueError(f"engine argument 'tensor_parallel_size' is {size}, which the model does not allow: {why}")


def load_part(config: EngineConfig, ranks: ProcessGroup) -> LoadedModel:
    """Raises ValueError or OSError with a text for the user, and torch.OutOfMemoryError."""
    device = _device_of(config, ranks.rank)
    loaded = _load(config, device)
    if loaded.decoder is None:
        raise refusal(config, loaded.why_modules)
    sharding, checked = Sharding(ranks, device), loaded.checked
    part = dataclasses.replace(
        loaded,
        decoder=sharding.decoder(loaded.decoder, loaded.layer_shapes),
        layer_shapes=sharding.layer_shapes(loaded.layer_shapes),
        device=device,
        checked=dataclasses.replace(
            checked,
            sequences=tuple(sequence.to(device) for sequence in checked.sequences),
            logits=checked.logits.to(device),
        ),
    )
    _drop_weights(loaded.model)
    return part


def _load(config: EngineConfig, device: torch.device) -> LoadedModel:
    """The whole model, in host memory."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine argument 'tensor_parallel_size' is {config.tensor_parallel_size}, from device '{config.device}' "
            f"on, but this torch ({torch.__version__}) sees {torch.cuda.device_count()} CUDA devices"
        )
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.num_threads or max(cores // config.tensor_parallel_size, 1))
    lean = lean_imports.without_compiler() if device.type == "cpu" else contextlib.nullcontext()
    with lean:
        loaded = load_model(msgspec.structs.replace(config, device="cpu"), dense=True)
    if config.quantization is not None:
        check_device(config.quantization, device, loaded.dtype)
    return loaded


def _drop_weights(model: nn.Module) -> None:
    """The modules only name the layers' KV memory from now on."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            del module.quantized
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
