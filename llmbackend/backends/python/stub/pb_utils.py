"""The module that models import as `triton_python_backend_utils`, or `c_python_backend_utils`.

Source: the list of names in golden transcript 61 and the python_backend documentation.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import NoReturn

import numpy as np

from .bls_call import ResponseIterator
from .errors import TritonError, TritonModelException, text
from .pb_host import Logger, Metric, MetricFamily, MetricKind, is_model_ready, load_model, unload_model
from .pb_model_config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from .pb_request import InferenceRequest, InferenceTrace, MemoryType, PreferredMemory
from .pb_response import FINAL, RELEASE_ALL, RELEASE_RESCHEDULE, InferenceResponse, InferenceResponseSender
from .pb_tensor import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from .runner import get_model_dir

__all__ = [
    "TRITONSERVER_MEMORY_CPU", "TRITONSERVER_MEMORY_GPU", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START", "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE", "TRITONSERVER_RESPONSE_COMPLETE_FINAL", "TRITON_STRING_TO_NUMPY",
    "InferenceRequest", "InferenceResponse", "InferenceResponseSender", "InferenceTrace", "Logger", "MemoryType",
    "Metric", "MetricFamily", "MetricKind", "ModelConfig", "PreferredMemory", "ResponseIterator", "Tensor",
    "TritonError", "TritonModelException", "deserialize_bytes_tensor", "get_input_config_by_name",
    "get_input_tensor_by_name", "get_model_dir", "get_output_config_by_name", "get_output_tensor_by_name",
    "is_model_ready", "json", "load_model", "np", "np_to_triton_dtype", "numpy_to_triton_type",
    "serialize_byte_tensor", "struct", "triton_string_to_numpy", "triton_to_numpy_type", "unload_model",
    "using_decoupled_model_transaction_policy",
]  # fmt: skip

MODULE_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL


def make_importable() -> None:
    """Lets models import this module under both of Triton's names: the second is that of its classes."""
    sys.modules.update(dict.fromkeys(MODULE_NAMES, sys.modules[__name__]))


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str | bytes) -> Tensor | None:
    """The input with that name; None if the request has none (an optional input)."""
    return _named(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str | bytes) -> Tensor | None:
    return _named(inference_response.output_tensors(), name)


def _named(tensors: list[Tensor], name: str | bytes) -> Tensor | None:
    name = text(name, "name")
    for tensor in tensors:
        if tensor._name == name:
            return tensor
    return None


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"pb_utils.{name} is not supported by llmbackend's python backend")
