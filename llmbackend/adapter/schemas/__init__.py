"""Schemas, which convert Triton tensors to prompts and back. `tensor_schema` in the configuration selects one, else the
backend's name."""

from __future__ import annotations

from collections.abc import Callable

from llmbackend.core.backend_api import ModelConfig, invalid_argument

from .llmapi import LlmApiSchema
from .schema import Schema, parameter
from .tensorrtllm import TensorRtLlmSchema
from .vllm import VllmSchema

TENSOR_SCHEMA = "tensor_schema"
"""The config.pbtxt parameter that names a schema."""
TENSORRTLLM_BACKEND = "tensorrtllm"
PYTHON_BACKEND = "python"
"""Of its models, this backend serves those with TensorRT-LLM's llmapi layout."""
_LLMAPI = "llmapi"
_CORE_TENSOR = "request_output_len"
_USER_TENSOR = "text_input"
_SCHEMAS: dict[str, Callable[[ModelConfig], Schema]] = {
    "vllm": VllmSchema,
    "tensorrtllm": lambda config: TensorRtLlmSchema(config, is_core=_declares(config, _CORE_TENSOR)),
    "tensorrtllm_core": lambda config: TensorRtLlmSchema(config, is_core=True),
    _LLMAPI: LlmApiSchema,
}


def schema_for(config: ModelConfig) -> Schema:
    """A model's schema. Raises TritonError INVALID_ARG for an unknown one."""
    name = _name(config)
    make = _SCHEMAS.get(name)
    if make is None:
        raise invalid_argument(f"parameter '{TENSOR_SCHEMA}' is '{name}', expected one of: {', '.join(_SCHEMAS)}")
    return make(config)


def is_tensorrtllm(config: ModelConfig) -> bool:
    """Whether a configuration is written for TensorRT-LLM."""
    return config.backend == TENSORRTLLM_BACKEND or parameter(config, TENSOR_SCHEMA).startswith("tensorrtllm")


def is_llmapi(config: ModelConfig) -> bool:
    """Whether a configuration has TensorRT-LLM's llmapi layout."""
    return _name(config) == _LLMAPI


def _name(config: ModelConfig) -> str:
    if name := parameter(config, TENSOR_SCHEMA):
        return name
    if config.backend == PYTHON_BACKEND:
        return _LLMAPI
    if config.backend != TENSORRTLLM_BACKEND:
        return "vllm"
    return "tensorrtllm" if _declares(config, _USER_TENSOR) else "tensorrtllm_core"


def _declares(config: ModelConfig, name: str) -> bool:
    return any(tensor.name == name for tensor in config.input)
