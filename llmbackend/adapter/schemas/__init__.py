"""Schemas that convert Triton tensors to a prompt and back; `tensor_schema` of the configuration, else the backend's
name, selects one."""

from __future__ import annotations

from collections.abc import Callable

from llmbackend.core.backend_api import ModelConfig, invalid_argument

from .schema import Schema, parameter
from .tensorrtllm import TensorRtLlmSchema
from .vllm import VllmSchema

TENSOR_SCHEMA = "tensor_schema"
"""The config.pbtxt parameter that names a schema."""
TENSORRTLLM_BACKEND = "tensorrtllm"
_CORE_TENSOR = "request_output_len"
_USER_TENSOR = "text_input"
_SCHEMAS: dict[str, Callable[[ModelConfig], Schema]] = {
    "vllm": VllmSchema,
    "tensorrtllm": lambda config: TensorRtLlmSchema(config, is_core=_declares(config, _CORE_TENSOR)),
    "tensorrtllm_core": lambda config: TensorRtLlmSchema(config, is_core=True),
}


def schema_for(config: ModelConfig) -> Schema:
    """A model's schema. Raises TritonError INVALID_ARG for one that does not exist."""
    name = parameter(config, TENSOR_SCHEMA) or _default(config)
    make = _SCHEMAS.get(name)
    if make is None:
        raise invalid_argument(f"parameter '{TENSOR_SCHEMA}' is '{name}', expected one of: {', '.join(_SCHEMAS)}")
    return make(config)


def is_tensorrtllm(config: ModelConfig) -> bool:
    """Whether a configuration is written for TensorRT-LLM."""
    return config.backend == TENSORRTLLM_BACKEND or parameter(config, TENSOR_SCHEMA).startswith("tensorrtllm")


def _default(config: ModelConfig) -> str:
    if config.backend != TENSORRTLLM_BACKEND:
        return "vllm"
    return "tensorrtllm" if _declares(config, _USER_TENSOR) else "tensorrtllm_core"


def _declares(config: ModelConfig, name: str) -> bool:
    return any(tensor.name == name for tensor in config.input)
