"""A client's grammar in Lark's notation: what may stand in it, and the schemas embedded in it, made enforceable.

For: compilation.py. Does not know: what the rules say. Invariant: no attribute or directive that takes tokens back,
changes sampling, or makes the compiler lenient comes through.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from .bounds import MAX_TAGS, Place
from .json_schema import enforceable
from .schema_keywords import SchemaOptions

_PIECES: Final = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
      | (?P<json>%json\b\s*)
      | (?P<directive>%\w+)
      | (?P<attributes>(?<=\w)\[[^\]\n]*\](?=\s*:))
      | (?P<grammar>@\w+)
      | (?P<other>[^"/%@#\[]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVES = ("%ignore", "%regex")
_ATTRIBUTES = ("lazy", "capture")
_FIRST_RULE = re.compile(r"^\s*(?:start\s*(?:\[[^\]\n]*\])?\s*:|%llguidance\b)", re.MULTILINE)


def is_lark(text: str) -> bool:
    """Whether it is not EBNF."""
    return "::=" not in text or _FIRST_RULE.search(text) is not None


def lark_grammar(text: str, place: Place, json_options: Mapping[str, Any], options: SchemaOptions) -> str:
    """The grammar for the compiler. Raises TritonError INVALID_ARG."""
    if text.lstrip().startswith("{"):
        place.wrong("is JSON, expected a grammar in Lark's notation or in EBNF")
    pieces, at, schemas = ["%llguidance {}\n"], 0, 0
    while at < len(text):
        match = _PIECES.match(text, at)
        assert match is not None  # the last alternative takes any character
        kind, piece, at = match.lastgroup, match.group(), match.end()
        if kind == "json":
            schemas += 1
            place.check_at_most(schemas, MAX_TAGS, "schemas")
            piece, at = _schema(text, at, place, json_options, options)
        else:
            _check(kind or "", piece, place)
        pieces.append(piece)
    return "".join(pieces)


def _schema(
    text: str, at: int, place: Place, json_options: Mapping[str, Any], options: SchemaOptions
) -> tuple[str, int]:
    line = text.count("\n", 0, at) + 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        place.wrong(f"line {line} of the grammar: what follows %json is not JSON: {error}")
    strict = dataclasses.replace(options, is_strict=True)  # as the compiler is with what a client writes for it
    schema = enforceable(value, place / f"%json at line {line}", strict, [])
    return f"%json {json.dumps({'x-guidance': dict(json_options), **schema}, ensure_ascii=False)}", end


def _check(kind: str, piece: str, place: Place) -> None:
    if kind == "directive" and piece not in _DIRECTIVES:
        place.wrong(f"the directive '{piece[:40]}' is not supported, expected one of: {', '.join(_DIRECTIVES)}, %json")
    if kind == "grammar":
        place.wrong(f"'{piece[:40]}' refers to another grammar, expected one grammar that is complete")
    if kind == "attributes":
        for attribute in piece[1:-1].split(","):
            name = attribute.partition("=")[0].strip()
            if name not in _ATTRIBUTES:
                place.wrong(f"the attribute '{name[:40]}' is not supported, expected one of: {', '.join(_ATTRIBUTES)}")
