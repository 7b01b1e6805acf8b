"""Constraints as large and as hard to compile as their bounds permit, each different from the one before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .attack import Attack, HttpSent, Sent

_REQUESTS, _FEW = 12, 3
"""With that many different constraints, so that none is answered from those compiled before; `_FEW` of a small size."""
_SMALL_BYTES = 1 << 20
_MAX_BYTES = 240 << 10
"""Sampling parameters have at most 256 KiB."""


def _asks(constraint: Callable[[int, int], dict[str, Any]]) -> Callable[[int], list[Sent]]:
    """constraint: of a size, and of the request's number."""

    def make(size: int) -> list[Sent]:
        body = {"model": "steady", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        count = _FEW if size < _SMALL_BYTES else _REQUESTS
        forms = [body | {"structured_outputs": constraint(size, number)} for number in range(count)]
        return [HttpSent("/v1/chat/completions", json.dumps(form).encode()) for form in forms]

    return make


def _names(size: int, number: int) -> dict[str, Any]:
    count = min(size // 40, 480)
    return {"json": {"type": "object", "properties": {f"p{number}_{n}": {"type": "integer"} for n in range(count)}}}


def _nested(size: int, number: int) -> dict[str, Any]:
    outer, inner = min(size // 900, 150), 25
    part = {"type": "object", "properties": {f"q{n}": {"type": "string"} for n in range(inner)}}
    return {"json": {"type": "object", "properties": {f"p{number}_{n}": part for n in range(outer)}}}


def _references(size: int, number: int) -> dict[str, Any]:
    count = min(size // 120, 60)
    both = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(count)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": {**both, f"d{count}": {"type": "integer", "minimum": number}}}}


def _unions(size: int, number: int) -> dict[str, Any]:
    options = [{"properties": {f"a{number}_{n}": {"const": n}}} for n in range(2)]
    return {"json": {"type": "object", "allOf": [{"anyOf": options} for _ in range(min(size // 200, 60))]}}


def _nested_references(size: int, number: int) -> dict[str, Any]:
    """A chain, which each of many lists follows."""
    count = min(size // 60, 3000)
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    item = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/d0"}}
    lists = {f"p{n}": item for n in range(min(count // 4, 480))}
    return {"json": {"$defs": {**chain, f"d{count}": {"type": "integer", "minimum": number}}, "properties": lists}}


def _nested_rules(count: int, number: int) -> str:
    return "\n".join(("start: r0", *(f"r{n}: ((r{n + 1}))?" for n in range(count)), f'r{count}: "{number}"'))


_EMPTY_LINES = {"type": "grammar", "grammar": "\n" * 100_000 + "x ::= y"}


def _tagged(content: dict[str, Any], size: int, number: int) -> dict[str, Any]:
    ends = [f"{number}{n}" for n in range(size // 16)] if content["type"] == "any_text" else f"{number}"
    return {"structural_tag": {"format": {"type": "tag", "begin": "<", "content": content, "end": ends}}}


_FORMS: tuple[tuple[str, Callable[[int, int], dict[str, Any]]], ...] = (
    ("schema of many properties", _names),
    ("schema of nested objects", _nested),
    ("schema of doubling references", _references),
    ("schema of doubling alternatives", _unions),
    ("schema of many values", lambda size, number: {"json": {"enum": [f"{number}v{n}" for n in range(size // 12)]}}),
    ("schema that is deep", lambda size, number: {"json": json.dumps("[" * size)}),
    ("multipleOf", lambda size, number: {"json": {"type": "integer", "multipleOf": 9973 - number, "minimum": 12345}}),
    ("many choices", lambda size, number: {"choice": [f"{number}c{n}" for n in range(min(size // 12, 4096))]}),
    ("regex of repetitions", lambda size, number: {"regex": f"((a{{99}}{number}){{99}}b){{9}}"}),
    ("regex of choices", lambda size, number: {"regex": f"(a|b)*a(a|b){{{400 + number}}}c"}),
    ("regex of many parts", lambda size, number: {"regex": f"({number}.*)" * min(size // 5, 1500)}),
    ("grammar of many rules", lambda size, number: {"grammar": _rules(min(size // 40, 500), number)}),
    ("grammar of empty lines", lambda size, number: {"grammar": "\n" * min(size, 65000) + f"r{number} ::= x"}),
    ("grammar of one string", lambda size, number: {"grammar": f'start: "{number}' + '\\"' * min(size // 4, 32000)}),
    ("grammar of one regex", lambda size, number: {"grammar": f"start: /{number}" + "\\/" * min(size // 3, 32000)}),
    ("grammar of nested rules", lambda size, number: {"grammar": _nested_rules(min(size // 24, 2600), number)}),
    ("schema of nested references", _nested_references),
    ("structural tag of many ends", lambda size, number: _tagged({"type": "any_text"}, size, number)),
    ("structural tag of empty lines", lambda size, number: _tagged(_EMPTY_LINES, size, number)),
)


def _rules(count: int, number: int) -> str:
    rules = [f'r{n} ::= "{number}" r{n + 1} | r{n + 1} "x"? r0?' for n in range(count)]
    return "\n".join(("root ::= r0", *rules, f'r{count} ::= "end"'))


STRUCTURE_ATTACKS = tuple(Attack(f"constraint: {name}", _asks(form), _MAX_BYTES) for name, form in _FORMS)
