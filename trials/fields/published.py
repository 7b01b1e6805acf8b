"""The kinds of objects that a package's types permit in one place, by their `type`.

Used by the tables. Independent of the API. Invariant: nothing is listed by hand.
"""

from __future__ import annotations

import typing
from typing import Any

import typing_extensions


def kinds(union: Any) -> frozenset[str]:
    """Each value of `type` of the TypedDicts of a union."""
    found: set[str] = set()
    for member in filter(typing_extensions.is_typeddict, _members(union)):
        hints = typing.get_type_hints(member)
        if "type" in hints:
            found |= set(_literals(hints["type"]))
    return frozenset(found)


def literals(hint: Any) -> frozenset[str]:
    return frozenset(_literals(hint))


def _members(union: Any) -> list[Any]:
    if typing.get_origin(union) is typing.Annotated:
        return _members(typing.get_args(union)[0])
    parts = typing.get_args(union)
    return [one for part in parts for one in _members(part)] if parts else [union]


def _literals(hint: Any) -> list[str]:
    if typing.get_origin(hint) is typing.Literal:
        return [value for value in typing.get_args(hint) if isinstance(value, str)]
    return [value for part in typing.get_args(hint) for value in _literals(part)]
