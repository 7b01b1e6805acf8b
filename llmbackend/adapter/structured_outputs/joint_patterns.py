"""Bounds how many regular expressions a schema applies to one value.

Used by json_schema.py, on translated schemas. The compiler makes one expression of those that apply to the same value:
its time doubles with each of them, and no limit of the compiler ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .constraint import MAX_JOINT_PATTERNS, MAX_SCHEMA_NODES, RequestPath

_IN_OBJECTS: Final = ("properties", "patternProperties")


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, and schemas that all apply to it."""

    schemas: Sequence[Any]
    path: str
    chosen: frozenset[int] = frozenset()
    """The lists of alternatives of which `schemas` has one."""


def check_joint_patterns(schema: dict[str, Any], place: RequestPath) -> None:
    """Raises TritonError INVALID_ARG naming the value."""
    if _num_patterns(schema) <= MAX_JOINT_PATTERNS:
        return
    definitions = schema.get("$defs", {})
    waiting, known, num_read = [_Value([schema], "")], set(), 0
    while waiting:
        value = waiting.pop()
        schemas, choices = _joined(value.schemas, definitions)
        # Without those that only refer to another one: each place that does so has its own.
        key = frozenset(id(each) for each in schemas if each.keys() - {"$ref"}), value.chosen
        if key in known:
            continue
        known.add(key)
        num_read += len(schemas)
        if num_read > 4 * MAX_SCHEMA_NODES:
            place.wrong("too many combinations of schemas with regular expressions apply to its values")
        open_choice = next((choice for choice in choices if id(choice) not in value.chosen), None)
        if open_choice is not None:
            chosen = value.chosen | {id(open_choice)}
            waiting += [_Value([*value.schemas, one], value.path, chosen) for one in open_choice]
            continue
        patterns = {each[name] for each in schemas for name in ("pattern", "format") if name in each}
        if len(patterns) > MAX_JOINT_PATTERNS:
            where = f"the value at {value.path}" if value.path else "the value"
            place.wrong(f"{len(patterns)} regular expressions apply to {where}, expected at most {MAX_JOINT_PATTERNS}")
        waiting += _members(schemas, value.path)


def _num_patterns(schema: Any) -> int:
    if isinstance(schema, list):
        return sum(map(_num_patterns, schema))
    if not isinstance(schema, dict):
        return 0
    own = isinstance(schema.get("pattern"), str) + isinstance(schema.get("format"), str)
    return own + sum(map(_num_patterns, schema.values()))


def _joined(schemas: Sequence[Any], definitions: dict[str, Any]) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """The schemas and those that apply with them, and the lists of alternatives in these."""
    found: dict[int, dict[str, Any]] = {}
    waiting = [*schemas]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in found:
            continue
        found[id(schema)] = schema
        waiting += schema.get("allOf", ())
        if "$ref" in schema:
            waiting.append(definitions[schema["$ref"].rpartition("/")[2]])
    joined = list(found.values())
    return joined, [each[name] for each in joined for name in ("anyOf", "oneOf") if name in each]


def _members(schemas: list[dict[str, Any]], path: str) -> Iterator[_Value]:
    for keyword in _IN_OBJECTS:
        for name in {name: None for each in schemas for name in each.get(keyword, ())}:
            members = [each.get(keyword, {}).get(name, each.get("additionalProperties")) for each in schemas]
            yield _Value(members, f"{path}/{name[:80]}")
    yield _Value([each.get("additionalProperties") for each in schemas], f"{path}/*")
    for index in range(max((len(each.get("prefixItems", ())) for each in schemas), default=0)):
        first = [each.get("prefixItems", ())[index : index + 1] or [each.get("items")] for each in schemas]
        yield _Value([item for items in first for item in items], f"{path}/{index}")
    yield _Value([each.get("items") for each in schemas], f"{path}/*")
