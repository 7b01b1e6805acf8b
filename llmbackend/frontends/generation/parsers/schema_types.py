"""The JSON types that a function's schema allows for a parameter, and the JSON value of a parameter's plain text: JSON
of an allowed type as the model wrote it, otherwise a string."""

from __future__ import annotations

import ast
import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]
"""JSON schema of the parameters, by function."""
_TYPES_OF_VALUES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_NARROWING = frozenset(
    ("enum", "const", "pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf", "not")
)
_MAX_REFERENCES = 8
_MAX_REFERENCE_CHARS = 1024
_MAX_PARTS = 64
_STRINGS = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_KNOWN_ESCAPES = re.compile(r"(?:[^\\]|\\[\\'\"abfnrtvxuU])*+")
"""Text without escapes for which Python emits a warning."""
_JOINED_WORD = re.compile(r"\d(?![eE][-+]?\d)[A-Za-z_]")
"""A number joined to a word, such as `1or`, for which Python emits a warning."""
_MAX_LITERAL_CHARS = 4096
"""Maximum length of a Python literal that is accepted where the model should have written JSON."""


def allowed_types(schema: Schema | None, parameter: str) -> frozenset[str]:
    """The types that a function's schema names for a parameter; empty if it names none."""
    return types_of(member_of(schema or {}, parameter, schema or {}), schema or {})


def types_of(description: object, schema: Schema) -> frozenset[str]:
    """The types that a part of the schema names."""
    return frozenset(_types(description, schema))


def is_plain_text(schema: Schema | None, parameter: str) -> bool:
    """Whether a parameter is an unrestricted string, whose value is the text itself; others may be JSON."""
    return is_any_string(member_of(schema or {}, parameter, schema or {}), schema or {})


def is_any_string(description: object, schema: Schema) -> bool:
    """Whether a part of the schema is an unrestricted string."""
    resolved = _resolved(description, schema)
    return resolved.get("type") == "string" and not any(keyword in resolved for keyword in _NARROWING)


def member_of(description: object, name: str, schema: Schema) -> object:
    """The schema of an object's member, with all of its descriptions as `anyOf`; None if there is none."""
    parts = list(_alternatives(description, schema))
    found = [one["properties"][name] for one in parts if name in _object(one, "properties")]
    found = found or [one["additionalProperties"] for one in parts if _object(one, "additionalProperties")]
    if not found:
        return None
    return found[0] if all(one == found[0] for one in found) else {"anyOf": found}


def item_of(description: object, schema: Schema) -> object:
    """The schema of an array's items; None if there is none."""
    return next((one["items"] for one in _alternatives(description, schema) if "items" in one), None)


def _alternatives(part: object, schema: Schema) -> Iterable[Schema]:
    """A part and its alternatives, at most _MAX_PARTS."""
    parts = deque([part])
    for _ in range(_MAX_PARTS):
        if not parts:
            return
        description = _resolved(parts.popleft(), schema)
        yield description
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts.extend(_list(description, keyword))


def _object(description: Schema, keyword: str) -> Schema:
    value = description.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _resolved(description: object, schema: Schema) -> Schema:
    """The description with its references resolved; {} for one that is not found within the limits."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(description, Mapping):
            return {}
        reference = description.get("$ref")
        if not isinstance(reference, str):
            return description
        if len(reference) > _MAX_REFERENCE_CHARS:
            return {}
        description = schema
        for part in reference.removeprefix("#/").split("/"):
            description = description.get(part) if isinstance(description, Mapping) else None
    return {}


def _types(part: object, schema: Schema) -> Iterable[str]:
    """The types of a part and of its alternatives; at most _MAX_PARTS."""
    parts = deque([part])
    for _ in range(_MAX_PARTS):
        if not parts:
            return
        description = _resolved(parts.popleft(), schema)
        named = description.get("type")
        if named is not None:
            names = [named] if isinstance(named, str) else _list(description, "type")
            yield from (name for name in names if isinstance(name, str))
            continue
        constants = [description["const"]] if "const" in description else []
        for value in [*_list(description, "enum"), *constants]:
            yield _TYPES_OF_VALUES.get(type(value), "string")
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts.extend(_list(description, keyword))


def _list(description: Schema, keyword: str) -> list[object]:
    value = description.get(keyword)
    return value[:_MAX_PARTS] if isinstance(value, list) else []


def json_of(text: str, types: frozenset[str], *, strings_are_text: bool = False) -> str:
    """JSON of the value of `text`, given the allowed types. strings_are_text: quotes of a string are part of it"""
    stripped = text.strip()
    value, is_json = _parsed(stripped)
    if not is_json and (literal := _python_literal(stripped, types)) is not None:
        return literal
    is_text = strings_are_text and isinstance(value, str) and "string" in types
    if is_json and not is_text and (_is_allowed(value, types) or "string" not in types):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> tuple[object, bool]:
    try:
        return json.loads(text, parse_constant=_no_constant), True
    except (ValueError, RecursionError):
        return None, False


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _is_allowed(value: object, types: frozenset[str]) -> bool:
    name = _TYPES_OF_VALUES[type(value)]
    return not types or name in types or (name == "integer" and "number" in types)


def _python_literal(text: str, types: frozenset[str]) -> str | None:
    """JSON of a Python literal of an allowed type other than string: True, None, {'a': 1}."""
    if len(text) > _MAX_LITERAL_CHARS or not _KNOWN_ESCAPES.fullmatch(text):
        return None
    if _JOINED_WORD.search(_STRINGS.sub("", text)):
        return None
    try:
        value = ast.literal_eval(text)
        if isinstance(value, str) or type(value) not in _TYPES_OF_VALUES or not types or not _is_allowed(value, types):
            return None
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
