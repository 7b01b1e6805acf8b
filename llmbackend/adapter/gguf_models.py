"""Engine arguments that name a GGUF file, or a directory that holds one: the model directory that is made of it.

For: the code that reads engine arguments. Does not know: requests, what is in such a file. Invariant: the engine and
the tokenizer's loader get a directory. It lies beside the packed weights; where none are kept, in a temporary folder of
this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.weight_cache.cache_folder import usable_directory
from llmbackend.fork_server.process_resources import OwnedFolder
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.model_directory import gguf_files, model_directory

from .four_bit_models import keeps_four_bits
from .text.template_trial import check_template

_FOLDER = "gguf"
_FIELDS = ("model", "tokenizer")


def is_gguf_model(path: Path) -> bool:
    """Whether this is a GGUF file or a directory whose weights are such files, be they fit to serve or not."""
    try:
        return bool(gguf_files(path))
    except GgufError:
        return True
    except OSError:  # a name too long, a directory that may not be read
        return False


def with_directories(config: EngineConfig, has_gpu: Callable[[], bool] = lambda: False) -> EngineConfig:
    """The configuration with directories in place of GGUF files, and `quantization` int4 where the model keeps its
    few bits (four_bit_models.py). has_gpu: asked where the configuration leaves the device open. Raises ValueError
    naming the argument and the file."""
    given = {field: value for field in _FIELDS if (value := getattr(config, field)) and is_gguf_model(Path(value))}
    keeps = keeps_four_bits(config) and (config.device == "cpu" or not has_gpu())
    if not given and not keeps:
        return config
    directories = {field: str(_directory(field, config)) for field in given}
    return msgspec.structs.replace(config, **directories, quantization="int4" if keeps else config.quantization)


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
    """Of this process."""
    return OwnedFolder(_FOLDER)
