"""Request parameters: which keys mean something to the host, and which types every protocol may give them.

For: HTTP /infer and gRPC, which share the keys and differ in the texts of their refusals. Does not know: tensors,
models.
Invariant: a parameter is either understood here, or handed to the model with the type the client gave it, or refused
by name.
Source: KServe v2 "parameters", sequence, schedule_policy extensions; texts as recorded from Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tritonclient.grpc.service_pb2 import InferParameter

from llmbackend.core.backend_api import ParameterValue, RequestFlag
from llmbackend.core.errors import TritonError, internal, invalid_argument

from .json_reader import as_bool, as_unsigned, parsing

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
_RESERVED_PREFIX: Final = "triton_"
_NO_FLAGS: Final = RequestFlag(0)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request's parameters say. `parameters` are those for the model; the last two are for the frontend."""

    correlation_id: int | str = 0
    flags: RequestFlag = _NO_FLAGS
    priority: int = 0
    timeout_us: int = 0
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    binary_data_output: bool = False
    empty_final_response: bool = False


_NO_OPTIONS: Final = RequestOptions()
_EMPTY_FINAL_RESPONSE: Final = RequestOptions(empty_final_response=True)
_EMPTY_FINAL_ALONE: Final = frozenset({EMPTY_FINAL})
_JSON_KEYS: Final = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"}
)
_GRPC_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param", "uint64_param"),
    EMPTY_FINAL: ("bool_param",),
}
_GRPC_CUSTOM_TYPES: Final = ("int64_param", "bool_param", "string_param", "double_param")


def options_from_json(parameters: Mapping[str, Any]) -> RequestOptions:
    """The options in the `parameters` object of an /infer request.

    Raises TritonError INVALID_ARG for a reserved key or a value that is no scalar, INTERNAL for a known key of the
    wrong type.
    """
    if not parameters:
        return _NO_OPTIONS
    values: dict[str, ParameterValue] = {}
    for key, value in parameters.items():
        if key.startswith(_RESERVED_PREFIX):
            raise invalid_argument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        values[key] = _known_json_value(key, value) if key in _JSON_KEYS else json_parameter(key, value)
    return _options(values, binary_data_output=bool(values.pop("binary_data_output", False)))


def _known_json_value(key: str, value: Any) -> ParameterValue:
    with parsing(key):
        if key in ("sequence_start", "sequence_end", "binary_data_output"):
            return as_bool(value)
        if key == "sequence_id" and isinstance(value, str):
            return value
        return as_unsigned(value)


def json_parameter(key: str, value: Any) -> ParameterValue:
    """A custom parameter of any protocol that speaks JSON.

    Raises TritonError INVALID_ARG unless it is a string, integer of 64 bits, boolean or double.
    """
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise internal("attempt to access JSON non-signed-integer as signed-integer")
    if isinstance(value, str | int | bool | float):
        return value
    raise invalid_argument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def options_from_proto(parameters: Mapping[str, InferParameter]) -> RequestOptions:
    """The options in the `parameters` of a ModelInferRequest.

    Raises TritonError INVALID_ARG for a reserved key or a value of a type the key does not take.
    """
    if not parameters:
        return _NO_OPTIONS
    values: dict[str, ParameterValue] = {}
    for key, parameter in sorted(parameters.items()):
        if key.startswith(_RESERVED_PREFIX) and key != EMPTY_FINAL:
            raise invalid_argument(
                "parameter keys starting with 'triton_' are reserved for Triton usage. "
                f"Only the following keys starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None or choice not in _GRPC_TYPES.get(key, _GRPC_CUSTOM_TYPES):
            raise _wrong_proto_type(key)
        values[key] = getattr(parameter, choice)
    if values.keys() == _EMPTY_FINAL_ALONE:  # what NVIDIA's client in C++ always sends
        return _EMPTY_FINAL_RESPONSE if values[EMPTY_FINAL] else _NO_OPTIONS
    if int(values.get("priority", 0)) < 0:
        raise invalid_argument("invalid value for 'priority', expected value >= 0.")
    if int(values.get("timeout", 0)) < 0:
        raise invalid_argument(f"invalid value {values['timeout']} for 'timeout' parameter, expected >= 0.")
    return _options(values, empty_final_response=bool(values.pop(EMPTY_FINAL, False)))


def _wrong_proto_type(key: str) -> TritonError:
    known = _GRPC_TYPES.get(key)
    expected = " or ".join(known) if known else "int64_param, bool_param, or string_param"
    return invalid_argument(f"invalid value type for '{key}' parameter, expected {expected}.")


def _options(
    values: dict[str, ParameterValue], binary_data_output: bool = False, empty_final_response: bool = False
) -> RequestOptions:
    """`values` holds known keys with their right types already."""
    correlation_id = values.pop("sequence_id", 0)
    flags = _NO_FLAGS
    if values.pop("sequence_start", False):
        flags |= RequestFlag.SEQUENCE_START
    if values.pop("sequence_end", False):
        flags |= RequestFlag.SEQUENCE_END
    return RequestOptions(
        correlation_id=correlation_id if isinstance(correlation_id, str) else int(correlation_id),
        flags=flags,
        priority=int(values.pop("priority", 0)),
        timeout_us=int(values.pop("timeout", 0)),
        parameters=values,
        binary_data_output=binary_data_output,
        empty_final_response=empty_final_response,
    )
