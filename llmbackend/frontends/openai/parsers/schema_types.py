"""Which JSON types a function's schema allows a parameter, and the JSON value that a text means there.

For: syntaxes whose values are plain text. Does not know: the syntaxes. Invariant: a text that is JSON of an allowed
type is passed on as the model wrote it; what can be nothing else is a string.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by the function's name."""
_TYPES_OF_VALUES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_MAX_LITERAL_CHARS = 4096
"""Python literals are read up to this length: they are a model's mistake for JSON."""


def allowed_types(schema: Mapping[str, Any] | None, parameter: str) -> frozenset[str]:
    """The types that the schema of a function's parameters names for one of them; none where it says nothing."""
    properties = (schema or {}).get("properties")
    description = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_types(description, depth=0))


def _types(schema: object, depth: int) -> Iterable[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return
    named = schema.get("type")
    yield from [named] if isinstance(named, str) else named if isinstance(named, list) else []
    values = schema.get("enum")
    if named is None:
        for value in [*(values if isinstance(values, list) else ()), *([schema["const"]] if "const" in schema else ())]:
            yield _TYPES_OF_VALUES.get(type(value), "string")
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(keyword)
            for part in parts if isinstance(parts, list) else ():
                yield from _types(part, depth + 1)


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON text of what `text` means where these types are allowed."""
    stripped = text.strip()
    value, is_json = _parsed(stripped)
    if not is_json and (literal := _python_literal(stripped, types)) is not None:
        return literal
    if is_json and (_is_allowed(value, types) or "string" not in types):
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
    if len(text) > _MAX_LITERAL_CHARS:
        return None
    try:
        value = ast.literal_eval(text)
        if isinstance(value, str) or type(value) not in _TYPES_OF_VALUES or not types or not _is_allowed(value, types):
            return None
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
