"""Grammars in Lark's notation for the compiler: the parts of generated grammars, and clients' own grammars.

Used by compilation.py and its translators. Independent of constraints. Invariants: in a generated grammar, a client's
text is always a quoted literal, a translated regular expression or translated JSON, never notation. A client's own
grammar has no attribute or directive that takes tokens back, changes sampling or makes the compiler lenient, and
schemas in it are made enforceable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from .constraint import (
    DEFINITION_KB,
    GROUP_KB,
    MAX_JOINT_PATTERNS,
    MAX_STACK_KB,
    MAX_TAGS,
    RequestPath,
    check_stack,
)
from .json_schema import enforceable
from .schema_keywords import SchemaOptions

NOTHING = '""'
TEXT = "TEXT"
"""The name of the terminal for any text, defined by `Rules`."""
_ANY_TEXT = "/(?s:.*)/"
_PIECES: Final = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?:[^/\\]|\\.)+/[imslux]*)
      | (?P<token><[^<>\s]+>)
      | (?P<unterminated>["/])
      | (?P<json>%json\b\s*)
      | (?P<directive>%\w+)
      | (?P<attribute>\b\w++(?=[ \t]*=))
      | (?P<grammar>@\w+)
      | (?P<name>_?(?:[a-z][_a-z0-9-]*|[A-Z][_A-Z0-9-]*))
      | (?P<other>[^\w"/%@#<]+|.)""",
    re.VERBOSE | re.DOTALL,
)
"""Divides a grammar as the compiler's lexer does, so that nothing is hidden in what looks like a string here. Each
attribute but `lazy` and `capture` has a value, and only attributes have one. A piece takes time proportional to its
length: an unterminated one, which is searched to the end of the text, is refused."""
_DIRECTIVES = ("%ignore", "%regex")
_ATTRIBUTES = ("lazy", "capture")
_FIRST_RULE = re.compile(r"^[ \t]*(?:start\s*(?:\[[^\]\n]*\]\s*)?:|%llguidance\b)", re.MULTILINE)


class Rules:
    """The rules of one grammar, under names not chosen by a client."""

    def __init__(self, special_tokens: Mapping[str, int], json_options: Mapping[str, Any], place: RequestPath) -> None:
        """special_tokens: id by text
        json_options: the compiler's, for embedded schemas
        place: of the constraint, for the refusal of a grammar that is too long
        """
        self._special_tokens = special_tokens
        self._json_options = json_options
        self._place = place
        self._lengths = sorted(set(map(len, special_tokens)), reverse=True)
        """Of the special tokens, longest first."""
        self._first_characters = {text[0] for text in special_tokens}
        self._lines: list[str] = []
        self._num_chars = 0
        self._num_names = 0

    def new_name(self) -> str:
        """A name for `define`, for a rule that is used before it is written."""
        self._num_names += 1
        return f"n{self._num_names}"

    def rule(self, body: str, attributes: str = "") -> str:
        """Adds a rule and returns its new name."""
        name = f"r{len(self._lines)}"
        self.define(name + attributes, body)
        return name

    def define(self, name: str, body: str) -> None:
        """Writes a rule whose name came from `new_name`."""
        self._lines.append(f"{name}: {body}")
        self._num_chars += len(self._lines[-1])
        self._place.check_size(self._num_chars)
        self._place.check_encodable(body)

    def terminal(self, body: str) -> str:
        """Adds a terminal, which matches greedily, and returns its new name."""
        name = f"T{len(self._lines)}"
        self.define(name, body)
        return name

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Adds a rule for the JSON of a translated schema and returns its new name."""
        return self.rule(_json_body(schema, self._json_options))

    def marker(self, text: str) -> str:
        """Matches a text; special tokens in it match both as tokens and as text."""
        pieces, end = [], 0
        for start, character in enumerate(text):
            may_begin = start >= end and character in self._first_characters
            if not may_begin or not (token := self._special_at(text, start)):
                continue
            if start > end:
                pieces.append(literal(text[end:start]))
            pieces.append(f"(<[{self._special_tokens[token]}]> | {literal(token)})")
            end = start + len(token)
        begins_as_text = bool(pieces) and pieces[0].startswith('"')
        if end < len(text) or not pieces:
            pieces.append(literal(text[end:]))
        # The lexer takes the longest match: the first piece alone would lose to another marker that begins with it.
        return f"({literal(text)} | {' '.join(pieces)})" if begins_as_text else " ".join(pieces)

    def text_until(self, end: str, excluded: tuple[str, ...] = ()) -> str:
        """Any text up to and including the first `end`."""
        alternatives = []
        if (marker := self.special_marker(end)) is not None:
            before = self.terminal(without(excluded)) if excluded else TEXT
            alternatives.append(f"{before} {marker}")
        if not excluded:
            alternatives.append(self.rule(f"{TEXT} {literal(end)}", "[lazy]"))
        else:
            alternatives.append(self.terminal(f"({without((*excluded, end))}) {literal(end)}"))
        return f"({' | '.join(alternatives)})"

    def special_marker(self, text: str) -> str | None:
        """The text, with its leading special token as a token; None if it begins with none."""
        token = self._special_at(text, 0)
        if not token:
            return None
        rest = self.marker(text[len(token) :]) if len(token) < len(text) else ""
        return f"<[{self._special_tokens[token]}]> {rest}"

    def _special_at(self, text: str, at: int) -> str:
        """The longest special token at this place, "" if there is none. A regular expression of all special tokens
        would hold the GIL for seconds: some models have thousands."""
        pieces = (text[at : at + length] for length in self._lengths)
        return next((piece for piece in pieces if piece in self._special_tokens), "")

    def grammar(self, start: str) -> str:
        lines = (f"start: {start}", f"{TEXT}: {_ANY_TEXT}", *self._lines)
        grammar = "%llguidance {}\n" + "\n".join(lines) + "\n"
        self._place.check_size(len(grammar))
        self._place.check_encodable(start)
        return grammar


def _json_body(schema: Mapping[str, Any], json_options: Mapping[str, Any]) -> str:
    """The body of a rule for the JSON of a translated schema."""
    return f"%json {json.dumps({'x-guidance': dict(json_options), **schema}, ensure_ascii=False)}"


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
    pieces, at, schemas, definitions = ["%llguidance {}\n"], 0, 0, _Definitions()
    while at < len(text):
        match = _PIECES.match(text, at)
        assert match is not None  # the last alternative takes any character
        kind, piece, at = match.lastgroup or "", match.group(), match.end()
        if kind == "unterminated":
            what, line = "string" if piece == '"' else "regular expression", text.count("\n", 0, at) + 1
            place.wrong(f"line {line} of the grammar: a {what} without its end")
        if kind == "json":
            schemas += 1
            place.check_at_most(schemas, MAX_TAGS, "schemas")
            piece, at = _schema(text, at, place, json_options, options)
        _check(kind, piece, place)
        definitions.read(kind, piece)
        pieces.append(piece)
    definitions.check(place, MAX_STACK_KB // 2 if schemas else MAX_STACK_KB)
    grammar = "".join(pieces)
    place.check_size(len(grammar))
    return grammar


class _Definitions:
    """What the definitions of a grammar use, read piece by piece."""

    def __init__(self) -> None:
        self._owner = ":"  # before the first definition
        self._depths = {self._owner: 0}
        """How deep groups nest in each."""
        self._uses: dict[str, set[str]] = {self._owner: set()}
        self._num_joined: dict[str, int] = {}
        """How many `&`s are in each."""
        self._num_open = 0
        self._name = ""
        """The last name: that of the next definition, if a colon or the brackets of its attributes follow."""

    def read(self, kind: str, piece: str) -> None:
        if kind == "name" and not (self._name and self._num_open):
            self._uses[self._owner].add(self._name)
            self._name = piece
        elif kind == "name":
            self._uses[self._owner].add(piece)
        elif kind == "other":
            for character in piece.replace("::", ""):
                self._read_symbol(character)

    def _read_symbol(self, character: str) -> None:
        if character in "([{":
            self._num_open += 1
            self._depths[self._owner] = max(self._depths[self._owner], self._num_open)
        elif character in ")]}":
            self._num_open = max(self._num_open - 1, 0)
        elif character == "&":
            self._num_joined[self._owner] = self._num_joined.get(self._owner, 0) + 1
        elif character == ":" and not self._num_open and self._name:
            self._owner, self._name = self._name, ""
            self._depths.setdefault(self._owner, 0)
            self._uses.setdefault(self._owner, set())

    def check(self, place: RequestPath, limit_kb: int) -> None:
        self._uses[self._owner].add(self._name)
        each_kb = {name: DEFINITION_KB + GROUP_KB * depth for name, depth in self._depths.items()}
        check_stack(place, each_kb, self._uses, limit_kb)
        if sum(self._num_joined.values()) > MAX_JOINT_PATTERNS:
            self._check_joined(place)

    def _check_joined(self, place: RequestPath) -> None:
        """Terminals, whose names are in capitals, are one regular expression with those that they use."""
        num_joined: dict[str, int] = {}

        def count(name: str) -> int:
            waiting = [name]
            while waiting:
                each = waiting[-1]
                used = [one for one in self._uses.get(each, ()) if one.isupper()]
                if each not in num_joined:
                    num_joined[each] = 0  # of a terminal that uses itself, which the compiler refuses
                    waiting += [one for one in used if one not in num_joined]
                else:
                    waiting.pop()
                    total = self._num_joined.get(each, 0) + sum(num_joined[one] for one in used)
                    num_joined[each] = min(total, MAX_JOINT_PATTERNS + 1)
            return num_joined[name]

        for name in self._num_joined:
            if count(name) > MAX_JOINT_PATTERNS:
                place.wrong(
                    f"the terminal '{name[:40]}' has more than {MAX_JOINT_PATTERNS} '&', with those that it uses"
                )


def _schema(
    text: str, at: int, place: RequestPath, json_options: Mapping[str, Any], options: SchemaOptions
) -> tuple[str, int]:
    line = text.count("\n", 0, at) + 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        place.wrong(f"line {line} of the grammar: what follows %json is not JSON: {error}")
    at_line = place / f"%json at line {line}"
    schema, _ = enforceable(value, at_line, options.strict())  # as the compiler is with the rest of the grammar
    return _json_body(schema, json_options), end


def _check(kind: str, piece: str, place: RequestPath) -> None:
    if kind == "directive" and piece not in _DIRECTIVES:
        place.wrong(f"the directive '{piece[:40]}' is not supported, expected one of: {', '.join(_DIRECTIVES)}, %json")
    if kind == "grammar":
        place.wrong(f"'{piece[:40]}' refers to another grammar, expected one grammar that is complete")
    if kind == "attribute" and piece not in _ATTRIBUTES:
        place.wrong(f"the attribute '{piece[:40]}' is not supported, expected one of: {', '.join(_ATTRIBUTES)}")
