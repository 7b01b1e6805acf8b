"""What the host and backends both read from a model configuration: Triton's JSON form, and the names in it."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from numpy import float32
from tritonclient.grpc.model_config_pb2 import ModelConfig

SERVED_MODEL_NAME = "served_model_name"
"""The parameter with further names of a model, separated by commas; they may hold slashes, dots and colons."""
ACCELERATORS_FIELD = "optimization.execution_accelerators"
ENVIRONMENT_PARAMETER = "EXECUTION_ENV_PATH"
"""Of models of the python backend; a python-based backend may have an environment for its models."""


def served_names(config: ModelConfig) -> tuple[str, ...]:
    """The names in the parameter `served_model_name`, by which clients may call the model besides its own name."""
    given = config.parameters
    return split_names(given[SERVED_MODEL_NAME].string_value) if SERVED_MODEL_NAME in given else ()


def split_names(text: str) -> tuple[str, ...]:
    """The names in a value of `served_model_name`, the canonical one first."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def accelerator_names(config: ModelConfig) -> list[str]:
    """`<name> (<device>)` of each execution accelerator, those for the CPU first."""
    accelerators = config.optimization.execution_accelerators
    return [
        *(f"{each.name} (cpu)" for each in accelerators.cpu_execution_accelerator),
        *(f"{each.name} (gpu)" for each in accelerators.gpu_execution_accelerator),
    ]


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Triton's JSON (ModelConfigToJson; golden transcripts 04 and 57): fields in declaration order, scalars always
    present, 64-bit integers as numbers, enums by name, sub-messages only if set."""
    return _message_to_json(config)


def _message_to_json(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = {}
    descriptor: Any
    for descriptor in message.DESCRIPTOR.fields:
        if descriptor.has_presence and not message.HasField(descriptor.name):
            continue
        value = getattr(message, descriptor.name)
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            value_field = descriptor.message_type.fields_by_name["value"]
            result[descriptor.name] = {str(key): _value_to_json(value_field, value[key]) for key in sorted(value)}
        elif descriptor.is_repeated:
            result[descriptor.name] = [_value_to_json(descriptor, item) for item in value]
        else:
            result[descriptor.name] = _value_to_json(descriptor, value)
    return result


def _value_to_json(descriptor: Any, value: Any) -> Any:
    if descriptor.message_type is not None:
        return _message_to_json(value)
    if descriptor.enum_type is not None:
        return descriptor.enum_type.values_by_number[value].name
    if isinstance(value, float):  # the shortest representation in its precision; whole numbers without a fraction
        shortest = float(str(float32(value))) if descriptor.type == FieldDescriptor.TYPE_FLOAT else value
        return int(shortest) if shortest.is_integer() else shortest
    return value
