"""Schemas that allow only a few values: which values, and the lists without repetitions of them.

For: schema_keywords.py. Does not know: the document around a schema. Invariant: the values are all that the schema
allows, each once as JSON Schema compares them (1 and 1.0 are equal, 1 and true are not).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Scalar = str | int | float | bool | None
_KEYWORDS: Final = frozenset(("type", "enum", "const"))
_OF_TYPE: Final[Mapping[str, tuple[Scalar, ...]]] = {"boolean": (True, False), "null": (None,)}
MAX_ORDERS: Final = 120
"""Of a list without repetitions: five values in any order."""


def finite_values(schema: Mapping[str, Any]) -> list[Scalar] | None:
    """The values of a schema that has only `type`, `enum` and `const`; None unless they are listed scalars."""
    if not schema.keys() <= _KEYWORDS:
        return None
    kinds = schema.get("type")
    if "const" in schema:
        values: Iterable[Any] = [schema["const"]]
    elif "enum" in schema:
        values = schema["enum"]
    elif isinstance(kinds, str) and kinds in _OF_TYPE:
        return list(_OF_TYPE[kinds])
    else:
        return None
    distinct = {_key(value): value for value in values if kinds is None or _is_of(value, kinds)}
    return None if any(isinstance(value, dict | list) for value in distinct.values()) else list(distinct.values())


def _key(value: Any) -> tuple[str, Any]:
    if isinstance(value, dict | list):
        return ("", id(value))
    return ("number", value) if isinstance(value, int | float) and not isinstance(value, bool) else ("", value)


def _is_of(value: Any, kinds: str | list[str]) -> bool:
    return any(_has_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and (isinstance(value, int) or value.is_integer()))
    names = {str: "string", type(None): "null", dict: "object", list: "array"}
    return names[type(value)] == kind


def lists_without_repetition(values: Sequence[object], least: int, most: int) -> list[dict[str, Any]] | None:
    """Schemas whose instances are the lists of `least` to `most` of the values, none of them twice; None where these
    are too many."""
    most = min(most, len(values))
    if least > most or math.perm(len(values), most) > MAX_ORDERS:
        return None
    return [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in order],
            "items": False,
            "minItems": least,
            "maxItems": most,
        }
        for order in itertools.permutations(values, most)
    ]
