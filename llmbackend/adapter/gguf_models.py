"""Resolves engine arguments that name a GGUF file, or a directory containing one, to a model directory made from it,
and decides whether quantized weights (2 to 8 bits) stay quantized on a CPU.

Used when engine arguments are read. Independent of requests and of how such weights are laid out. Invariants: the
engine and the tokenizer loader always get a directory, stored next to the packed weights or, without a weight cache, in
a temporary folder of this process; of weights, only file headers are read. A hub id is not inspected before its
download, and keeps its 4 bits only with quantization=int4.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import CheckpointError
from llmbackend.engine.kernels.library import available
from llmbackend.engine.model.checkpoint_files import has_four_bits
from llmbackend.engine.weight_cache.cache_folder import usable_directory
from llmbackend.fork_server.process_resources import OwnedFolder
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.model_directory import gguf_files, hold, is_made_of_gguf, model_directory
from llmbackend.gguf.stored import FileMatrices

from .text.template_trial import check_template

_FOLDER = "gguf"
_FIELDS = ("model", "tokenizer")


def is_gguf_model(path: Path) -> bool:
    """Whether this is a GGUF file or a directory whose weights are GGUF files, even if they cannot be served."""
    try:
        return bool(gguf_files(path))
    except GgufError:
        return True
    except OSError:  # the name is too long, or a directory is not readable
        return False


def with_directories(config: EngineConfig, has_gpu: Callable[[], bool] = lambda: False) -> EngineConfig:
    """The configuration with directories in place of GGUF files, and with `quantization` int4 if the model's weights
    stay quantized. has_gpu: called if the configuration does not set the device. Raises
    ValueError that names the argument and the file."""
    given = {field: value for field in _FIELDS if (value := getattr(config, field)) and is_gguf_model(Path(value))}
    keeps = _keeps_quantized_weights(config) and (config.device == "cpu" or not has_gpu())
    if not given and not keeps:
        return config
    directories = {field: str(_directory(field, config)) for field in given}
    return msgspec.structs.replace(config, **directories, quantization="int4" if keeps else config.quantization)


def _keeps_quantized_weights(config: EngineConfig) -> bool:
    """Whether the model has weights in 2 to 8 bits that native kernels can multiply, and the configuration leaves their
    storage open."""
    is_open = config.quantization is None and config.dtype == "auto" and config.kernels != "torch"
    if not is_open or config.device.startswith("cuda") or config.load_format == "dummy":
        return False
    try:
        files = gguf_files(Path(config.model))
        found = FileMatrices(files).count > 0 if files else has_four_bits(Path(config.model))
    except (GgufError, CheckpointError, OSError):  # later steps report it better
        return False
    return found and bool(available())


def hold_directories(config: EngineConfig, user: object) -> None:
    """Prevents their removal, after the load of many other models, as long as `user` exists: engines that are started
    again read them. Raises OSError."""
    for directory in {Path(getattr(config, field)) for field in _FIELDS}:
        if is_made_of_gguf(directory):
            weakref.finalize(user, os.close, hold(directory))


def _directory(field: str, config: EngineConfig) -> Path:
    value = getattr(config, field)
    try:
        check = functools.partial(check_template, interpreter=config.engine_python)
        return model_directory(gguf_files(Path(value)), _parent(config), check)
    except GgufError as error:
        raise ValueError(
            f"engine argument '{field}' is '{value}', a checkpoint that cannot be served: {error}"
        ) from None
    except OSError as error:
        raise ValueError(f"engine argument '{field}' is '{value}', which cannot be read: {error}") from None


def _parent(config: EngineConfig) -> Path:
    cache = usable_directory(config)
    return _temporary().path if cache is None else cache / _FOLDER


@functools.cache
def _temporary() -> OwnedFolder:
    """Belongs to this process."""
    return OwnedFolder(_FOLDER)
