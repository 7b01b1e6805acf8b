"""A model's own sampling defaults: what counts where a request does not say.

For: ModelState, for models whose requests have vLLM's defaults. Does not know: requests. Invariant: every default is
one that a request could have sent; a wrong one in a checkpoint's file is left out with a warning, a wrong one of the
operator refuses the load. End-of-sequence tokens are the engine's business.
Source: vLLM's ModelConfig.get_diff_sampling_param (its arguments generation_config and override_generation_config).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmbackend.core.backend_api import TritonError, invalid_argument, shown
from llmbackend.engine.config import EngineConfig

from .sampling import parse_sampling_parameter
from .text import local_directory, read_json
from .tokenizer_files import GENERATION_CONFIG_FILE

logger = logging.getLogger(__name__)

AUTO, NOWHERE = "auto", "vllm"
_PARAMETER_OF = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json → sampling parameter. Others (do_sample, beams) are not read, as in vLLM."""


def read_sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """Values by sampling parameter. Raises TritonError INVALID_ARG naming the engine argument that is wrong."""
    defaults: dict[str, Any] = {}
    for field, value in _file_of(config).items():
        try:
            defaults |= _default(field, value)
        except TritonError as error:
            logger.warning("%s of '%s': '%s' is not used: %s", GENERATION_CONFIG_FILE, config.model, field, error)
    for field, value in (config.override_generation_config or {}).items():
        what = f"engine argument 'override_generation_config': '{field}'"
        if field not in _PARAMETER_OF:
            raise invalid_argument(f"{what} is not supported, expected one of: {', '.join(_PARAMETER_OF)}")
        try:
            defaults |= _default(field, value)
        except TritonError as error:
            raise invalid_argument(f"{what} is {shown(value)}: {error}") from None
    if defaults:
        logger.info("'%s': where a request does not say, sampling parameters are %s", config.model, defaults)
    return defaults


def _default(field: str, value: Any) -> dict[str, Any]:
    name = _PARAMETER_OF.get(field)
    return {} if name is None or value is None else {name: parse_sampling_parameter(name, value)}


def _file_of(config: EngineConfig) -> Mapping[str, Any]:
    source = config.generation_config
    if source == NOWHERE or (source == AUTO and config.model == "mock"):
        return {}
    try:
        if source == AUTO:
            return read_json(local_directory(config.model, config.engine_python) / GENERATION_CONFIG_FILE)
        path = Path(source) / GENERATION_CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"expected '{AUTO}', '{NOWHERE}' or a folder with a {GENERATION_CONFIG_FILE}")
        return read_json(path)
    except (ValueError, OSError) as error:
        raise invalid_argument(f"engine argument 'generation_config' is '{source}': {error}") from error
