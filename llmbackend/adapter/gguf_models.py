"""Resolves engine arguments that name a GGUF file, or a directory containing one, to a model directory made from it.

Used when engine arguments are read. Independent of requests and of the content of such files. Invariant: the engine and
the tokenizer loader always get a directory. It is stored next to the packed weights or, without a weight cache, in a
temporary folder of this process.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.weight_cache.cache_folder import usable_directory
from llmbackend.fork_server.process_resources import OwnedFolder
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.model_directory import gguf_files, hold, is_made_of_gguf, model_directory

from .quantized_weights import keeps_quantized_weights
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
    stay quantized (quantized_weights.py). has_gpu: called if the configuration does not set the device. Raises
    ValueError that names the argument and the file."""
    given = {field: value for field in _FIELDS if (value := getattr(config, field)) and is_gguf_model(Path(value))}
    keeps = keeps_quantized_weights(config) and (config.device == "cpu" or not has_gpu())
    if not given and not keeps:
        return config
    directories = {field: str(_directory(field, config)) for field in given}
    return msgspec.structs.replace(config, **directories, quantization="int4" if keeps else config.quantization)


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
