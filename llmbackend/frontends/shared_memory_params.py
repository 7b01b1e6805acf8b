"""Where a tensor lies in shared memory, and how many classes of an output are wanted, as the protocols say it.

For: infer_tensors and grpc_codec. Does not know: regions (core.memory looks at them). Source: the shared memory
and classification extensions of KServe v2; texts of Triton's http_server and infer_handler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmbackend.core.errors import invalid_argument
from llmbackend.core.tensors import Place

from .json_reader import as_bool, as_string, as_unsigned, parsing

REGION, OFFSET, BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
CLASSIFICATION = "classification"
MOST_CLASSES = 2**32 - 1
"""Triton counts classes in 32 bits; a larger number would wrap there."""


def place_from_json(parameters: Mapping[str, Any]) -> Place:
    """Of a tensor that is in shared memory. Raises TritonError for a value of the wrong type."""
    with parsing(REGION):
        region = as_string(parameters[REGION])
    with parsing(OFFSET):
        offset = as_unsigned(parameters.get(OFFSET, 0))
    with parsing(BYTE_SIZE):
        byte_size = as_unsigned(parameters.get(BYTE_SIZE, 0))
    return Place(region, offset, byte_size)


def check_output_parameters(parameters: Mapping[str, Any]) -> None:
    """Raises TritonError INVALID_ARG for an output in shared memory that shall be something else, too."""
    if REGION not in parameters:
        return
    if CLASSIFICATION in parameters:
        raise invalid_argument("Output can't set both 'shared_memory_region' and 'classification'")
    with parsing("binary_data"):
        is_binary = as_bool(parameters.get("binary_data", False))
    if is_binary:
        raise invalid_argument("Output can't set both 'shared_memory_region' and 'binary_data'")


def classes_from_json(parameters: Mapping[str, Any]) -> int:
    """0 = not as classes."""
    with parsing(CLASSIFICATION, "set"):
        count = as_unsigned(parameters[CLASSIFICATION])
    return _checked_classes(count)


def _checked_classes(count: int) -> int:
    if count > MOST_CLASSES:
        raise invalid_argument(f"invalid value for 'classification' parameter, expected <= {MOST_CLASSES}")
    return count


def place_from_proto(tensor: Any) -> Place | None:
    """Of an input or requested output of a ModelInferRequest, None when it is not in shared memory. The size is
    required here."""
    region = _parameter(tensor, REGION, "string_param")
    offset = _parameter(tensor, OFFSET, "int64_param")
    byte_size = _parameter(tensor, BYTE_SIZE, "int64_param")
    if region is None:
        for key, value in ((OFFSET, offset), (BYTE_SIZE, byte_size)):
            if value is not None:
                raise invalid_argument(
                    f"'{key}' can not be specified without '{REGION}' parameter for tensor '{tensor.name}'"
                )
        return None
    if byte_size is None:
        raise invalid_argument(
            f"'{BYTE_SIZE}' must be specified along with '{REGION}' parameter for tensor '{tensor.name}'"
        )
    return Place(region, offset or 0, byte_size)


def _parameter(tensor: Any, key: str, expected: str) -> Any:
    """None when it is not there."""
    if key not in tensor.parameters:
        return None
    parameter = tensor.parameters[key]
    if parameter.WhichOneof("parameter_choice") != expected:
        raise invalid_argument(
            f"invalid value type for '{key}' parameter for tensor '{tensor.name}', expected {expected}."
        )
    return getattr(parameter, expected)


def classes_from_proto(output: Any) -> int:
    """0 = not as classes."""
    if CLASSIFICATION not in output.parameters:
        return 0
    parameter = output.parameters[CLASSIFICATION]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise invalid_argument("invalid value type for 'classification' parameter, expected int64_param")
    count: int = parameter.int64_param
    if count <= 0:
        raise invalid_argument("invalid value for 'classification' parameter, expected >= 0")
    if REGION in output.parameters:
        raise invalid_argument("output can't set both 'shared_memory_region' and 'classification'")
    return _checked_classes(count)
