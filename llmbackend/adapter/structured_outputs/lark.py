"""Grammars in Lark's notation for the compiler: the parts of generated grammars, and clients' own grammars.

Used by compilation.py and its translators. Independent of constraints. Invariants: in a generated grammar, a client's
text is always a quoted literal, a translated regular expression or translated JSON, never notation. A client's own
grammar has no attribute or directive that takes tokens back, changes sampling or makes the compiler lenient, and
schemas in it are made enforceable.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from .constraint import MAX_TAGS, RequestPath
from .json_schema import enforceable
from .schema_keywords import SchemaOptions

NOTHING = '""'
TEXT = "TEXT"
"""The name of the terminal for any text, defined by `Rules`."""
_ANY_TEXT = "/(?s:.*)/"
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


class Rules:
    """The rules of one grammar, under names not chosen by a client."""

    def __init__(self, special_tokens: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        """special_tokens: id by text
        json_options: the compiler's, for embedded schemas
        """
        self._special_tokens = special_tokens
        self._json_options = dict(json_options)
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._lines: list[str] = []
        self._num_names = 0

    def new_name(self) -> str:
        """A name for `define`, for a rule that is used before it is written."""
        self._num_names += 1
        return f"n{self._num_names}"

    def rule(self, body: str, attributes: str = "") -> str:
        """Adds a rule and returns its new name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def define(self, name: str, body: str) -> None:
        """Writes a rule whose name came from `new_name`."""
        self._lines.append(f"{name}: {body}")

    def terminal(self, body: str) -> str:
        """Adds a terminal, which matches greedily, and returns its new name."""
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Adds a rule for the JSON of a translated schema and returns its new name."""
        with_options = {"x-guidance": self._json_options, **schema}
        return self.rule(f"%json {json.dumps(with_options, ensure_ascii=False)}")

    def marker(self, text: str) -> str:
        """Matches a text; special tokens in it match both as tokens and as text."""
        pieces, end = [], 0
        for match in self._special.finditer(text) if self._special else ():
            if match.start() > end:
                pieces.append(literal(text[end : match.start()]))
            token_id = self._special_tokens[match.group()]
            pieces.append(f"(<[{token_id}]> | {literal(match.group())})")
            end = match.end()
        begins_as_text = bool(pieces) and pieces[0].startswith('"')
        if end < len(text) or not pieces:
            pieces.append(literal(text[end:]))
        # The lexer takes the longest match: the first piece alone would lose to another marker that begins with it.
        return f"({literal(text)} | {' '.join(pieces)})" if begins_as_text else " ".join(pieces)

    def text_until(self, end: str, excluded: tuple[str, ...] = ()) -> str:
        """Any text up to and including the first `end`."""
        alternatives = []
        if (marker := self.special_marker(end)) is not None:
            alternatives.append(f"{without(excluded)} {marker}")
        if not excluded:
            alternatives.append(self.rule(f"{TEXT} {literal(end)}", "[lazy]"))
        else:
            alternatives.append(self.terminal(f"({without((*excluded, end))}) {literal(end)}"))
        return f"({' | '.join(alternatives)})"

    def special_marker(self, text: str) -> str | None:
        """The text, with its leading special token as a token; None if it begins with none."""
        token = self._special.match(text) if self._special else None
        if token is None:
            return None
        rest = self.marker(text[token.end() :]) if token.end() < len(text) else ""
        return f"<[{self._special_tokens[token.group()]}]> {rest}"

    def grammar(self, start: str) -> str:
        lines = (f"start: {start}", f"{TEXT}: {_ANY_TEXT}", *self._lines)
        return "%llguidance {}\n" + "\n".join(lines) + "\n"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def without(excluded: tuple[str, ...]) -> str:
    """The body of a terminal for any text that contains none of `excluded`."""
    if not excluded:
        return TEXT
    # One complement of all of them: an intersection of several would take many times as many lexer states.
    alternatives = " | ".join(literal(text) for text in excluded)
    return f"{TEXT} & ~(/(?s:.*)/ ({alternatives}) /(?s:.*)/)"


# --- a client's own grammar -----------------------------------------------------------------------------------------


def is_lark(text: str) -> bool:
    """Whether it is Lark rather than EBNF."""
    return "::=" not in text or _FIRST_RULE.search(text) is not None


def lark_grammar(text: str, place: RequestPath, json_options: Mapping[str, Any], options: SchemaOptions) -> str:
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
    text: str, at: int, place: RequestPath, json_options: Mapping[str, Any], options: SchemaOptions
) -> tuple[str, int]:
    line = text.count("\n", 0, at) + 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        place.wrong(f"line {line} of the grammar: what follows %json is not JSON: {error}")
    strict = dataclasses.replace(options, is_strict=True)  # as the compiler is with the rest of the grammar
    schema, _ = enforceable(value, place / f"%json at line {line}", strict)
    return f"%json {json.dumps({'x-guidance': dict(json_options), **schema}, ensure_ascii=False)}", end


def _check(kind: str, piece: str, place: RequestPath) -> None:
    if kind == "directive" and piece not in _DIRECTIVES:
        place.wrong(f"the directive '{piece[:40]}' is not supported, expected one of: {', '.join(_DIRECTIVES)}, %json")
    if kind == "grammar":
        place.wrong(f"'{piece[:40]}' refers to another grammar, expected one grammar that is complete")
    if kind == "attributes":
        for attribute in piece[1:-1].split(","):
            name = attribute.partition("=")[0].strip()
            if name not in _ATTRIBUTES:
                place.wrong(f"the attribute '{name[:40]}' is not supported, expected one of: {', '.join(_ATTRIBUTES)}")
