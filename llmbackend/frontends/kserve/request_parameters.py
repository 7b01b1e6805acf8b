"""Parameters of requests and of their tensors, for HTTP /infer and gRPC, whose error texts differ.

Independent of tensor data, models and shared memory regions. Invariant: each parameter is used by the host, passed to
the model with the client's type, or refused by name.

Sources: KServe v2 "parameters", sequence, schedule_policy, shared memory and classification extensions; texts of Triton
2.51.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from tritonclient.grpc.service_pb2 import InferParameter

from llmbackend.core.backend_api import ParameterValue, RequestFlag
from llmbackend.core.errors import internal, invalid_argument
from llmbackend.core.tensors import SharedRange

from ..http.json_reader import as_bool, as_string, as_unsigned, parsing

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
_RESERVED_PREFIX: Final = "triton_"
_NO_FLAGS: Final = RequestFlag(0)
_UINT64: Final = (1 << 64) - 1
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
REGION, OFFSET, BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
CLASSIFICATION: Final = "classification"
MAX_CLASSES: Final = 2**32 - 1
"""Triton counts classes in 32 bits, in which a larger number would overflow."""
_RESERVED_NAMES: Final = _JSON_KEYS | {"headers"}
Headers = Iterable[tuple[str | bytes, str | bytes]] | Any
"""Name and value of each header; None: gRPC has no metadata."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    correlation_id: int | str = 0
    """Id of the sequence; 0: none."""
    flags: RequestFlag = _NO_FLAGS
    priority: int = 0
    """0: the model's default."""
    timeout_us: int = 0
    """Timeout in the queue; 0: the model's default."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    """Parameters that are passed to the model."""
    binary_data_output: bool = False
    """Whether outputs are raw bytes by default."""
    empty_final_response: bool = False
    """Whether a final response is sent even without outputs."""


_NO_OPTIONS: Final = RequestOptions()
_EMPTY_FINAL_RESPONSE: Final = RequestOptions(empty_final_response=True)


def options_from_json(parameters: Mapping[str, Any]) -> RequestOptions:
    """parameters: those of an /infer request. Raises TritonError INVALID_ARG for a reserved key or a value that is not
    a scalar, INTERNAL for a known key of the wrong type."""
    if not parameters:
        return _NO_OPTIONS
    values: dict[str, ParameterValue] = {}
    for key, value in parameters.items():
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
    """A custom parameter. Raises TritonError for a reserved key, and unless it is a string, 64-bit integer, boolean or
    double."""
    if key.startswith(_RESERVED_PREFIX):
        raise invalid_argument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise internal("attempt to access JSON non-signed-integer as signed-integer")
    if isinstance(value, str | int | bool | float):
        return value
    raise invalid_argument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def options_from_proto(parameters: Mapping[str, InferParameter]) -> RequestOptions:
    """parameters: those of a ModelInferRequest. Raises TritonError INVALID_ARG for a reserved key or a wrong type."""
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
        known = _GRPC_TYPES.get(key)
        if choice is None or choice not in (known or _GRPC_CUSTOM_TYPES):
            expected = " or ".join(known) if known else "int64_param, bool_param, or string_param"
            raise invalid_argument(f"invalid value type for '{key}' parameter, expected {expected}.")
        values[key] = getattr(parameter, choice)
    if values.keys() == _EMPTY_FINAL_ALONE:  # NVIDIA's C++ client always sends it
        return _EMPTY_FINAL_RESPONSE if values[EMPTY_FINAL] else _NO_OPTIONS
    if int(values.get("priority", 0)) < 0:
        raise invalid_argument("invalid value for 'priority', expected value >= 0.")
    if int(values.get("timeout", 0)) < 0:
        raise invalid_argument(f"invalid value {values['timeout']} for 'timeout' parameter, expected >= 0.")
    return _options(values, empty_final_response=bool(values.pop(EMPTY_FINAL, False)))


def _options(
    values: dict[str, ParameterValue], binary_data_output: bool = False, empty_final_response: bool = False
) -> RequestOptions:
    """values: known keys with values of their types, and the model's parameters"""
    sequence_id = values.pop("sequence_id", 0)
    flags = _NO_FLAGS
    if values.pop("sequence_start", False):
        flags |= RequestFlag.SEQUENCE_START
    if values.pop("sequence_end", False):
        flags |= RequestFlag.SEQUENCE_END
    return RequestOptions(
        # gRPC's int64_param holds ids from 2**63 on as negative numbers
        correlation_id=sequence_id if isinstance(sequence_id, str) else int(sequence_id) & _UINT64,
        flags=flags,
        priority=int(values.pop("priority", 0)),
        timeout_us=int(values.pop("timeout", 0)),
        parameters=values,
        binary_data_output=binary_data_output,
        empty_final_response=empty_final_response,
    )


def shared_range_from_json(parameters: Mapping[str, Any]) -> SharedRange:
    """The location of a tensor in shared memory. Raises TritonError for a value of the wrong type."""
    with parsing(REGION):
        region = as_string(parameters[REGION])
    with parsing(OFFSET):
        offset = as_unsigned(parameters.get(OFFSET, 0))
    with parsing(BYTE_SIZE):
        byte_size = as_unsigned(parameters.get(BYTE_SIZE, 0))
    return SharedRange(region, offset, byte_size)


def check_output_parameters(parameters: Mapping[str, Any]) -> None:
    """Raises TritonError INVALID_ARG for an output in shared memory that is also requested in another form."""
    if REGION not in parameters:
        return
    if CLASSIFICATION in parameters:
        raise invalid_argument("Output can't set both 'shared_memory_region' and 'classification'")
    with parsing("binary_data"):
        is_binary = as_bool(parameters.get("binary_data", False))
    if is_binary:
        raise invalid_argument("Output can't set both 'shared_memory_region' and 'binary_data'")


def classes_from_json(parameters: Mapping[str, Any]) -> int:
    """The number of requested classes of an output; 0: the output itself."""
    with parsing(CLASSIFICATION, "set"):
        count = as_unsigned(parameters[CLASSIFICATION])
    return _checked_classes(count)


def _checked_classes(count: int) -> int:
    if count > MAX_CLASSES:
        raise invalid_argument(f"invalid value for 'classification' parameter, expected <= {MAX_CLASSES}")
    return count


def shared_range_from_proto(tensor: Any) -> SharedRange | None:
    """The shared memory location of a ModelInferRequest's input or output, or None. Unlike in JSON, the size is
    required."""
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
    return SharedRange(region, offset or 0, byte_size)


def _parameter(tensor: Any, key: str, expected: str) -> Any:
    if key not in tensor.parameters:
        return None
    parameter = tensor.parameters[key]
    if parameter.WhichOneof("parameter_choice") != expected:
        raise invalid_argument(
            f"invalid value type for '{key}' parameter for tensor '{tensor.name}', expected {expected}."
        )
    return getattr(parameter, expected)


def classes_from_proto(output: Any) -> int:
    """Like `classes_from_json`, for a requested output of a ModelInferRequest."""
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


class _Pattern(Protocol):
    def search(self, text: str, /) -> object | None: ...


@dataclass(frozen=True, slots=True)
class HeaderForward:
    """Headers or metadata that become parameters of the request: those whose name contains a match of `pattern` (RE2),
    case-insensitive unless the pattern has `(?-i)`; None: none.

    They override parameters of the body, so that what a proxy adds cannot be forged. As in Triton, for /infer,
    ModelInfer and ModelStreamInfer, not for generate. Sources: --http-header-forward-pattern,
    --grpc-header-forward-pattern (golden 60); reserved names as in Triton's QA.
    """

    pattern: _Pattern | None = None

    @classmethod
    def of(cls, pattern: str) -> HeaderForward:
        """pattern: "" forwards nothing. Raises ValueError if it is not a regular expression."""
        return cls(_compiled(pattern) if pattern else None)

    def __bool__(self) -> bool:
        return self.pattern is not None

    def added(self, parameters: Mapping[str, ParameterValue], headers: Headers) -> Mapping[str, ParameterValue]:
        """`parameters` plus forwarded headers, named as sent. Raises TritonError INVALID_ARG for a reserved name."""
        if self.pattern is None:
            return parameters
        found: dict[str, ParameterValue] = {}
        for name, value in headers or ():
            key = name.decode("latin-1") if isinstance(name, bytes) else name
            if self.pattern.search(key):
                if key.lower() in _RESERVED_NAMES or key.lower().startswith(_RESERVED_PREFIX):
                    raise invalid_argument(
                        f"header '{key}' can not be forwarded: parameter key '{key}' is reserved for Triton usage"
                    )
                found[key] = value.decode("latin-1") if isinstance(value, bytes) else value
        return {**parameters, **found} if found else parameters

    def into(self, options: RequestOptions, headers: Headers) -> RequestOptions:
        """Like `added`, for gRPC."""
        return replace(options, parameters=self.added(options.parameters, headers))


def _compiled(pattern: str) -> _Pattern:
    import re2  # not needed by a server that forwards nothing

    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    try:
        compiled: _Pattern = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        raise ValueError(reason.decode() if isinstance(reason, bytes) else str(reason)) from None
    return compiled


FORWARD_NOTHING: Final = HeaderForward()
