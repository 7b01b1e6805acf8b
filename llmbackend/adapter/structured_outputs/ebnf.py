"""Grammars in EBNF (llama.cpp's GBNF, XGrammar's) → rules for the compiler.

For: compilation.py. Does not know: Lark beyond `Rules`. Invariants: what is not recursive becomes one terminal, so that
the compiler's longest match cannot cut it where the grammar would not; what has no translation is refused by its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Final

from . import regular_expressions
from .bounds import MAX_DEPTH, MAX_REGEX_LENGTH, Place
from .lark import NOTHING, Rules, literal

ROOT: Final = "root"
_MAX_RULES = 512
_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
      | (?P<rule>[A-Za-z_][\w-]*)(?=[ \t\r\n]*::=)
      | (?P<name>[A-Za-z_][\w-]*)
      | (?P<define>::=)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<repeat>\{\s*\d{1,7}\s*(?:,\s*(?:\d{1,7})?\s*)?\}|[*+?])
      | (?P<symbol>[()|.])""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of a grammar: "text" (Lark's notation of something that matches text), "name", "all", "any" or "times"."""

    kind: str
    text: str = ""
    parts: tuple[_Node, ...] = ()
    length: int = 1


def ebnf(text: str, place: Place, rules: Rules) -> str:
    """The name of the rule for `root`. Raises TritonError INVALID_ARG naming the line."""
    definitions = _Parser(text, place).definitions()
    if ROOT not in definitions:
        place.wrong(f"the grammar has no rule '{ROOT}'")
    return _Writer(definitions, place, rules).write()


class _Parser:
    def __init__(self, text: str, place: Place) -> None:
        self._place = place
        self._tokens = [*self._split(text), _Token("end", "", text.count("\n") + 1)]
        self._at = 0
        self._depth = 0

    def _split(self, text: str) -> Iterator[_Token]:
        at, line = 0, 1
        while at < len(text):
            match = _TOKENS.match(text, at)
            if match is None:
                self._place.wrong(f"line {line} of the grammar: {text[at : at + 20]!r} is not supported")
            kind = match.lastgroup or ""
            if kind != "space":
                yield _Token(kind, match.group(), line)
            line += match.group().count("\n")
            at = match.end()

    def _refuse(self, what: str) -> None:
        token = self._tokens[self._at]
        self._place.wrong(f"line {token.line} of the grammar: {what}, found {token.text[:20]!r}")

    def _take(self, *texts: str) -> bool:
        if self._tokens[self._at].text in texts and self._tokens[self._at].kind != "string":
            self._at += 1
            return True
        return False

    def definitions(self) -> dict[str, _Node]:
        found: dict[str, _Node] = {}
        while self._tokens[self._at].kind != "end":
            token = self._tokens[self._at]
            if token.kind != "rule":
                self._refuse("expected a rule, which is 'name ::= …'")
            if token.text in found:
                self._refuse("expected a rule of a new name")
            self._place.check_at_most(len(found) + 1, _MAX_RULES, "rules")
            self._at += 2
            found[token.text] = self._alternatives()
        return found

    def _alternatives(self) -> _Node:
        self._depth += 1
        self._place.check_at_most(self._depth, MAX_DEPTH, "nested groups")
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else _Node("any", parts=tuple(parts))

    def _sequence(self) -> _Node:
        parts = []
        while (part := self._part()) is not None:
            while self._tokens[self._at].kind == "repeat":
                part = _Node("times", self._repeat(self._tokens[self._at].text), (part,))
                self._at += 1
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Node("all", parts=tuple(parts))

    def _repeat(self, text: str) -> str:
        if text in ("*", "+", "?"):
            return text
        least, comma, most = (piece.strip() for piece in text[1:-1].partition(","))
        if most and int(most) < int(least):
            self._refuse("a repetition whose least count is above its most")
        return f"{{{least}{comma}{most}}}"

    def _part(self) -> _Node | None:
        token = self._tokens[self._at]
        if self._take("("):
            inside = self._alternatives()
            if not self._take(")"):
                self._refuse("expected ')'")
            return inside
        if token.kind in ("name", "string", "class") or token.text == ".":
            self._at += 1
            if token.kind == "name":
                return _Node("name", token.text)
            return _Node("text", self._terminal(token))
        if token.kind in ("repeat", "define"):
            self._refuse("expected something to repeat or to match")
        return None

    def _terminal(self, token: _Token) -> str:
        if token.kind == "string":
            return literal(self._unescaped(token))
        if token.kind == "class":
            return f"/{regular_expressions.whole(_spelled(token.text), self._place)}/"
        return r"/[^\n]/"

    def _unescaped(self, token: _Token) -> str:
        def replaced(match: re.Match[str]) -> str:
            digits = match.group(1) or match.group(2) or match.group(3)
            if not digits:
                return _ESCAPES.get(match.group(4), match.group(4))
            return chr(int(digits, 16)) if int(digits, 16) <= 0x10FFFF else "\ud800"

        text = _ESCAPE.sub(replaced, token.text[1:-1])
        if any("\ud800" <= character < "\ue000" for character in text):
            self._place.wrong(f"line {token.line} of the grammar: an escape that is no character")
        return text


def _spelled(characters: str) -> str:
    """A class with long escapes in the regular expression's spelling."""
    return re.sub(r"\\U([0-9A-Fa-f]{8})", lambda match: f"\\u{{{int(match.group(1), 16):x}}}", characters)


@dataclass(slots=True)
class _Writer:
    definitions: dict[str, _Node]
    place: Place
    rules: Rules
    _written: dict[str, str] = field(default_factory=dict)
    _recursive: set[str] = field(default_factory=set)
    _lengths: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._recursive = _recursive(self.definitions, self.place)

    def write(self) -> str:
        """Writes all definitions; what the root is called. A terminal comes behind those that it uses; names of rules
        are known before their bodies are written, which refer to each other."""
        for name in self._terminals():
            self._lengths[name] = self._length(self.definitions[name])
            self._written[name] = self.rules.terminal(self._text(self.definitions[name]))
        rules = [name for name in self.definitions if name in self._recursive]
        self._written |= {name: self.rules.new_name() for name in rules}
        for name in rules:
            self.rules.define(self._written[name], self._body(self.definitions[name]))
        return self._written[ROOT]

    def _terminals(self) -> Iterator[str]:
        order = TopologicalSorter(
            {name: set(_names(node)) for name, node in self.definitions.items() if name not in self._recursive}
        )
        yield from order.static_order()

    def _is_text(self, node: _Node) -> bool:
        if node.kind == "name":
            return node.text not in self._recursive
        return all(map(self._is_text, node.parts))

    def _length(self, node: _Node) -> int:
        """Characters of a terminal with its repetitions written out; the compiler builds a state for each."""
        if node.kind == "name":
            return self._lengths[node.text]
        length = max(sum(map(self._length, node.parts)), 1 if node.kind != "text" else len(node.text))
        if node.kind == "times":
            counts = [int(count) for count in re.findall(r"\d+", node.text)]
            length *= max((1, *counts))
        self.place.check_at_most(length, MAX_REGEX_LENGTH, "characters of a rule with repetitions written out")
        return length

    def _text(self, node: _Node) -> str:
        """As the body of a terminal."""
        if node.kind == "text":
            return node.text
        if node.kind == "name":
            return self._written[node.text]
        return self._joined(node, [self._text(part) for part in node.parts])

    def _body(self, node: _Node) -> str:
        """As the body of a rule; what stands together and is not recursive is one terminal."""
        if self._is_text(node):
            if node == _Node("all"):
                return NOTHING
            self._length(node)
            return self.rules.terminal(self._text(node))
        if node.kind == "name":
            return self._written[node.text]
        if node.kind != "all":
            return self._joined(node, [self._body(part) for part in node.parts])
        return " ".join(self._runs(node.parts))

    def _runs(self, parts: tuple[_Node, ...]) -> Iterator[str]:
        run: list[_Node] = []
        for part in parts:
            if self._is_text(part):
                run.append(part)
                continue
            if run:
                yield self._body(_Node("all", parts=tuple(run)))
                run = []
            yield self._body(part)
        if run:
            yield self._body(_Node("all", parts=tuple(run)))

    def _joined(self, node: _Node, parts: list[str]) -> str:
        if node.kind == "times":
            return f"({parts[0]}){node.text}"
        if node.kind == "any":
            return f"({' | '.join(part or NOTHING for part in parts)})"
        return f"({' '.join(parts)})" if parts else NOTHING


def _names(node: _Node) -> Iterator[str]:
    if node.kind == "name":
        yield node.text
    for part in node.parts:
        yield from _names(part)


def _recursive(definitions: dict[str, _Node], place: Place) -> set[str]:
    """The definitions that reach themselves, or one that does."""
    uses = {name: set(_names(node)) for name, node in definitions.items()}
    for name, used in uses.items():
        for missing in used - definitions.keys():
            place.wrong(f"the grammar's rule '{name[:40]}' uses '{missing[:40]}', which is not defined")
    reached = {name: _reached(name, uses) for name in definitions}
    looped = {name for name in definitions if name in reached[name]}
    return {name for name in definitions if name in looped or reached[name] & looped}


def _reached(name: str, uses: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for used in uses[waiting.pop()]:
            if used not in seen:
                seen.add(used)
                waiting.append(used)
    return seen
