"""A model configuration's `parameters`, read by a backend.

For: the pytorch and onnxruntime backends. Does not know: what a parameter does. Invariant: a value that is not of its
kind is an error that names it; a key that has no meaning here is warned about and ignored, as Triton's backends do with
keys that they do not know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from llmbackend.core.backend_api import ModelConfig, TritonError, invalid_argument

_log = logging.getLogger(__name__)

Readers = Mapping[str, Callable[[str], Any]]


def boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise ValueError("expected true or false")
    return values[text.lower()]


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("expected a number of at least 1")
    return number


def read_parameters(config: ModelConfig, readers: Readers) -> dict[str, Any]:
    """The values of the parameters that are set. Raises TritonError INVALID_ARG."""
    found = {}
    for key, value in config.parameters.items():
        if key in readers:
            found[key] = _read(config.name, key, value.string_value, readers[key])
        else:
            _log.warning("model '%s': parameter '%s' has no effect in this server", config.name, key)
    return found


def _read(model: str, key: str, text: str, reader: Callable[[str], Any]) -> Any:
    try:
        return reader(text)
    except ValueError as error:
        refusal: TritonError = invalid_argument(f"model '{model}': parameter '{key}' is '{text}': {error}")
        raise refusal from None
