"""A ModelConfig as Triton's JSON: proto field names, explicit defaults, 64-bit integers as numbers (protobuf's own JSON
quotes them)."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from llmbackend.core.backend_api import ModelConfig, invalid_argument

_INT64_TYPES = frozenset(
    {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64},
)


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _unquote_int64(config.DESCRIPTOR, fields)
    return fields


def config_to_json(config: ModelConfig) -> str:
    return json.dumps(config_to_dict(config), separators=(",", ":"))


def config_from_dict(fields: dict[str, Any]) -> ModelConfig:
    """Raises TritonError INVALID_ARG for a field or value that ModelConfig does not have."""
    try:
        return json_format.ParseDict(fields, ModelConfig())
    except json_format.ParseError as error:
        raise invalid_argument(f"model configuration is not valid: {error}") from error


def _unquote_int64(descriptor: Descriptor, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        field = descriptor.fields_by_name[name]
        fields[name] = _unquote_value(field, value)


def _unquote_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _unquote_value(inner, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unquote_single(field, item) for item in value]
    return _unquote_single(field, value)


def _unquote_single(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and isinstance(value, dict):
        _unquote_int64(field.message_type, value)
        return value
    if field.cpp_type in _INT64_TYPES and isinstance(value, str):
        return int(value)
    return value
