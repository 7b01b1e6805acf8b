"""Random schemas, one family per keyword.

Used by the neighbouring tests. Independent of grammars. Invariant: the same seed gives the same schemas.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
Family = Callable[[random.Random], Schema]

WORDS = ("a", "b", "id", "name", "é", "x-y", "long_name", "ab c", '"q"', "\\", "$ref", "1")
PATTERNS = (
    "^a", "b$", "^[a-c]{2,3}$", "a|^b", "^(?:ab|cd)+$", "^\\d{3}-\\d{2}$", "^[^\\s]+$", "\\w\\W", "^.{1,4}$", "^[[(]$",
    "^\\S*$", "^(?<year>\\d{4})$", "x.y", "^é\\u00e9$", "^[&&a]$", "^\\p{L}+$", "^a*?b$",
)  # fmt: skip
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def scalar(rng: random.Random) -> Any:
    number = rng.choice([0, 1, -1, 7, 100, -250, 2**40])
    return rng.choice([None, True, False, number, 0.5, -1.25, "", "a", "é\n", 'say "x"', "\\"])


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.random()
    if depth and kind < 0.2:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if depth and kind < 0.4:
        return {rng.choice(WORDS): value(rng, depth - 1) for _ in range(rng.randint(0, 3))}
    return scalar(rng)


def simple(rng: random.Random) -> Schema:
    return rng.choice(
        [
            {"type": "integer"},
            {"type": "string", "maxLength": 5},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["x", 3]},
            {"type": "number", "minimum": 0, "maximum": 9},
            {"const": [1]},
            {"type": ["integer", "null"]},
        ]
    )


def _limits(rng: random.Random, kind: str) -> Schema:
    low = rng.choice([0, 1, -5, 12, 999, -1000])
    high = low + rng.choice([1, 3, 50, 1234])
    scale = rng.choice([1, 1, 0.5, 0.01]) if kind == "number" else 1
    names = (rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"]))
    limits = dict(zip(names, (low * scale, high * scale + scale), strict=True))
    return {"type": kind} | dict(rng.sample(sorted(limits.items()), rng.randint(1, 2)))


def _object(rng: random.Random) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {name: simple(rng) for name in names}}
    if rng.random() < 0.7:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, True, simple(rng)])
    return schema


def _counts(rng: random.Random, suffix: str, most: int) -> Schema:
    low = rng.randint(0, most)
    chosen = {f"min{suffix}": low, f"max{suffix}": low + rng.randint(0, 3)}
    return dict(rng.sample(sorted(chosen.items()), rng.randint(1, 2)))


def _pattern_properties(rng: random.Random) -> Schema:
    first, second = rng.choice([("^a", "^b"), ("x$", "^[0-9]+$"), ("^i_", "^n_")])
    schema: Schema = {"type": "object", "patternProperties": {first: simple(rng)}}
    if second != "^[0-9]+$":
        schema["patternProperties"][second] = simple(rng)
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, {"type": "integer"}])
    if rng.random() < 0.4:
        schema["properties"] = {"zz": simple(rng)}
    return schema


def _tree(rng: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": simple(rng),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": rng.randint(1, 2)},
        },
        "required": rng.choice([["value"], ["value", "children"]]),
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _union(rng: random.Random, keyword: str) -> Schema:
    options = [
        {"type": "object", "properties": {"kind": {"const": name}, "v": simple(rng)}, "required": ["kind"]}
        for name in ("one", "two", "three")[: rng.randint(2, 3)]
    ]
    if rng.random() < 0.5:
        return {keyword: options}
    definitions = {f"T{index}": option for index, option in enumerate(options)}
    return {keyword: [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions}


def _all_of(rng: random.Random) -> Schema:
    parts: list[Schema] = [
        _object(rng),
        {"properties": {rng.choice(WORDS): simple(rng)}},
        {"required": [rng.choice(WORDS)]},
    ]
    return {"type": "object", "allOf": rng.sample(parts, rng.randint(1, 3))}


def _tuple(rng: random.Random) -> Schema:
    first = [simple(rng) for _ in range(rng.randint(1, 3))]
    rest = rng.choice([False, {"type": "integer"}])
    if rng.random() < 0.5:
        return {"type": "array", "prefixItems": first, "items": rest, "minItems": rng.randint(0, len(first))}
    schema: Schema = {"type": "array", "items": first, "additionalItems": rest}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _mixed(rng: random.Random, depth: int = 2) -> Schema:
    if not depth or rng.random() < 0.2:
        return rng.choice([simple, *LEAVES])(rng)
    kind = rng.random()
    if kind < 0.5:
        schema = _object(rng)
        for name in schema["properties"]:
            schema["properties"][name] = _mixed(rng, depth - 1)
        return schema
    if kind < 0.75:
        return {"type": "array", "items": _mixed(rng, depth - 1), **_counts(rng, "Items", 2)}
    return {"anyOf": [_mixed(rng, depth - 1), _mixed(rng, depth - 1)]}


def _siblings(rng: random.Random) -> Schema:
    """Keywords of several types at once, without a type."""
    parts: list[Schema] = [{"minimum": 3}, {"maxLength": 2}, {"minItems": 1}, {"required": ["a"]}, {"pattern": "^a"}]
    return {key: item for part in rng.sample(parts, rng.randint(1, 4)) for key, item in part.items()}


LEAVES: tuple[Family, ...] = (
    lambda rng: _limits(rng, "integer"),
    lambda rng: _limits(rng, "number"),
    lambda rng: {"type": "string", **_counts(rng, "Length", 4)},
    lambda rng: {"type": "string", "pattern": rng.choice(PATTERNS)},
)
FAMILIES: dict[str, Family] = {
    "type": lambda rng: {"type": rng.sample(["string", "integer", "number", "boolean", "null", "array", "object"], 2)},
    "enum": lambda rng: {"enum": [value(rng) for _ in range(rng.randint(1, 6))]},
    "const": lambda rng: {"const": value(rng, 3)},
    "integer limits": LEAVES[0],
    "number limits": LEAVES[1],
    "draft 4 limits": lambda rng: {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": rng.randint(-9, 9),
        "exclusiveMinimum": rng.random() < 0.5,
    },
    "close limits": lambda rng: {
        "type": "number",
        rng.choice(["minimum", "exclusiveMinimum"]): (low := rng.choice([-2, -1.5, -1, -0.51, 0, 0.1, 1, 10, 12.5])),
        rng.choice(["maximum", "exclusiveMaximum"]): low + rng.choice([0.01, 0.25, 0.5, 1, 1.5]),
    },
    "multipleOf": lambda rng: {"type": "number", "multipleOf": rng.choice([1, 2, 3, 7, 10, 0.5, 0.25, 0.01, 1.5])},
    "multipleOf limits": lambda rng: {**_limits(rng, "integer"), "multipleOf": rng.choice([1, 2, 3])},
    "lengths": LEAVES[2],
    "pattern": LEAVES[3],
    "pattern lengths": lambda rng: {"pattern": rng.choice(PATTERNS[:4]), "type": "string", "maxLength": 4},
    "format": lambda rng: {"type": "string", "format": rng.choice(FORMATS)},
    "items": lambda rng: {"type": "array", "items": simple(rng), **_counts(rng, "Items", 3)},
    "prefixItems": _tuple,
    "properties": _object,
    "patternProperties": _pattern_properties,
    "additionalProperties": lambda rng: {"type": "object", "additionalProperties": simple(rng)},
    "maxProperties": lambda rng: {"type": "object", "maxProperties": rng.randint(0, 3)},
    "minProperties": lambda rng: {
        "type": "object",
        "minProperties": rng.randint(0, 1),
        "additionalProperties": simple(rng),
    },
    "unevaluatedProperties": lambda rng: {
        "properties": {"a": simple(rng)},
        "unevaluatedProperties": False,
        "type": "object",
    },
    "anyOf": lambda rng: _union(rng, "anyOf"),
    "oneOf": lambda rng: _union(rng, "oneOf"),
    "oneOf types": lambda rng: {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}, {"type": "null"}]},
    "allOf": _all_of,
    "ref": _tree,
    "siblings": _siblings,
    "nested": _mixed,
    "unique items": lambda rng: {
        "$defs": {"d": {"enum": ["x", 1, None, True, "y"][: rng.randint(1, 5)], "title": "D"}},
        "type": "array",
        "items": rng.choice([{"$ref": "#/$defs/d", "description": "x"}, {"type": "boolean"}, {"enum": [1, 1.0, True]}]),
        "minItems": rng.randint(0, 1),
        "maxItems": rng.randint(2, 4),
        "uniqueItems": True,
    },
    "property names": lambda rng: {
        "$defs": {"d": {"enum": ["x", "y"]}},
        "type": "object",
        "propertyNames": rng.choice(
            [{"$ref": "#/$defs/d"}, {"const": "a"}, {"pattern": "^[a-c]{1,2}$"}, {"format": "date"}]
        ),
        "additionalProperties": rng.choice([{"type": "integer"}, {"maxLength": 2}]),
    },
    "refused": lambda rng: {
        "type": "object",
        "properties": {
            "a": rng.choice(
                [
                    {"not": {"type": "null"}},
                    {"type": "array", "uniqueItems": True},
                    {"contains": {"const": 1}},
                    {"if": {"type": "string"}, "then": {"minLength": 2}},
                    {"dependentRequired": {"a": ["b"]}},
                    {"propertyNames": {"maxLength": 2}},
                    {"type": "string", "format": "regex"},
                    {"frobnicate": 1},
                    {"$ref": "https://example.com/schema"},
                ]
            )
        },
        "required": ["a"],
    },
}


def schemas(count: int, seed: int = 0) -> Iterator[tuple[str, Schema]]:
    """`count` schemas of each family."""
    for name, family in FAMILIES.items():
        rng = random.Random(f"{name} {seed}")
        for _ in range(count):
            yield name, family(rng)
