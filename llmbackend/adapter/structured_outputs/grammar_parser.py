"""Parses a grammar in Lark's notation or EBNF into definitions that can be written inside another grammar.

Used by embedded_grammars.py. Independent of how definitions are written. Invariants: an unsupported part of a notation
is refused with its line number; every name used in a parsed grammar is defined. llguidance's own `gbnf_to_lark` (1.9.1)
has no limits and splits a rule into several lexemes, whose longest matches then reject texts of the grammar (`[a-z]*
"end"`: "endend"; `("a" | "ab") "b"`: "ab"); its escapes for non-ASCII characters do not compile.
Source: Lark's grammar reference, whose `common` library has the common terminals; llama.cpp's GBNF, XGrammar's EBNF.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from .constraint import DEFINITION_KB, GROUP_KB, MAX_DEPTH, MAX_GRAMMAR_CHARS, RequestPath, check_stack

_MAX_DEFINITIONS: Final = 512
_MAX_NODES: Final = 4096
_MAX_REPEATS: Final = 2
"""Of one part, such as `"a"+?`: each nests it deeper."""
_LARK_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)
      | (?P<head>[?!]{0,2}[A-Za-z_]\w*)(?=[ \t]*:)
      | (?P<alias>->\s*\w+)
      | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
      | (?P<directive>%\w+)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<repeat>[*+?]|~\s*\d{1,7}(?:\s*\.\.\s*\d{1,7})?|\{\s*\d{1,7}\s*(?:,\s*(?:\d{1,7}\s*)?)?\})
      | (?P<range>\.\.)
      | (?P<symbol>[:|()\[\],.])""",
    re.VERBOSE,
)
_EBNF_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
      | (?P<head>[A-Za-z_][\w-]*)(?=[ \t\r\n]*::=)
      | (?P<name>[A-Za-z_][\w-]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<repeat>\{\s*\d{1,7}\s*(?:,\s*(?:\d{1,7}\s*)?)?\}|[*+?])
      | (?P<symbol>::=|[()|.])""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LONG_ESCAPE = re.compile(r"\\U([0-9A-Fa-f]{8})")
_ONE_CHARACTER = re.compile(r"([A-Za-z0-9 ])|\\([nrt])")
"""A regular expression that matches only one text."""
_FLAGS: Final = frozenset("is")
_COMMON: Final = r"""
DIGIT: /[0-9]/
HEXDIGIT: /[0-9A-Fa-f]/
INT: DIGIT+
SIGNED_INT: /[+-]/? INT
DECIMAL: INT "." INT? | "." INT
FLOAT: INT _EXP | DECIMAL _EXP?
_EXP: /[eE]/ SIGNED_INT
SIGNED_FLOAT: /[+-]/? FLOAT
NUMBER: FLOAT | INT
SIGNED_NUMBER: /[+-]/? NUMBER
LCASE_LETTER: /[a-z]/
UCASE_LETTER: /[A-Z]/
LETTER: /[A-Za-z]/
WORD: LETTER+
CNAME: /[A-Za-z_]/ /[A-Za-z0-9_]/*
ESCAPED_STRING: /"(?:[^"\\\n]|\\[^\n])*"/
WS_INLINE: /[ \t]+/
WS: /[ \t\f\r\n]+/
CR: "\r"
LF: "\n"
NEWLINE: /(?:\r?\n)+/
SH_COMMENT: /#[^\n]*/
CPP_COMMENT: /\/\/[^\n]*/
"""
"""What `%import common.NAME` can import."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a grammar."""

    kind: Literal["text", "regex", "name", "all", "any", "times"]
    text: str = ""
    """The text of "text"; the expression of "regex"; the name of "name"."""
    flags: str = ""
    """Of a text ("i") or a regular expression ("i", "s")."""
    parts: tuple[Node, ...] = ()
    """The sequence of "all", the alternatives of "any", the repeated part of "times"."""
    least: int = 1
    most: int | None = 1
    """Repetitions of "times"; None = unlimited."""


@dataclass(frozen=True, slots=True)
class Definitions:
    rules: dict[str, Node]
    terminals: dict[str, Node]
    ignored: tuple[Node, ...]
    """What is permitted between terminals."""
    start: str
    """The name of the first rule."""


def is_terminal(name: str) -> bool:
    """In Lark's notation."""
    return name.lstrip("_")[:1].isupper()


def parse_ebnf(text: str, place: RequestPath) -> Definitions:
    """All definitions are rules. Raises TritonError INVALID_ARG that names the line."""
    found = _Parser(text, place, is_lark=False).definitions("root")
    for owner, node in found.rules.items():
        for name in names(node):
            if name not in found.rules:
                place.wrong(f"the grammar's rule '{owner[:40]}' uses '{name[:40]}', which is not defined")
    _check_stack(found, place)
    return found


def parse_lark(text: str, place: RequestPath) -> Definitions:
    """Raises TritonError INVALID_ARG that names the line."""
    place.check_at_most(len(text), MAX_GRAMMAR_CHARS, "characters of a grammar")
    found = _Parser(text, place, is_lark=True).definitions("start")
    for owner, node in (*found.rules.items(), *found.terminals.items(), *(("%ignore", one) for one in found.ignored)):
        for name in names(node):
            if name not in found.rules and name not in found.terminals:
                place.wrong(f"the grammar's '{owner[:40]}' uses '{name[:40]}', which is not defined")
            if (is_terminal(owner) or owner == "%ignore") and not is_terminal(name):
                place.wrong(f"the grammar's terminal '{owner[:40]}' uses the rule '{name[:40]}', expected terminals")
    _check_stack(found, place)
    return found


def _check_stack(found: Definitions, place: RequestPath) -> None:
    nodes = found.rules | found.terminals
    each_kb = {name: DEFINITION_KB + GROUP_KB * _depth(node) for name, node in nodes.items()}
    check_stack(place, each_kb, {name: names(node) for name, node in nodes.items()})


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, node.parts)) if node.parts else 0


def names(node: Node) -> Iterator[str]:
    if node.kind == "name":
        yield node.text
    for part in node.parts:
        yield from names(part)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


class _Parser:
    def __init__(self, text: str, place: RequestPath, *, is_lark: bool) -> None:
        self._place = place
        self._is_lark = is_lark
        self._tokens = [*self._split(text), _Token("end", "", text.count("\n") + 1)]
        self._at = 0
        self._depth = 0
        self._num_nodes = 0
        self._rules: dict[str, Node] = {}
        self._terminals: dict[str, Node] = {}
        self._ignored: list[Node] = []

    def _split(self, text: str) -> Iterator[_Token]:
        at, line = 0, 1
        tokens = _LARK_TOKENS if self._is_lark else _EBNF_TOKENS
        while at < len(text):
            match = tokens.match(text, at)
            if match is None:
                self._place.wrong(f"line {line} of the grammar: {text[at : at + 20]!r} is not supported")
            if match.lastgroup != "space":
                yield _Token(match.lastgroup or "", match.group(), line)
            line += match.group().count("\n")
            at = match.end()

    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _refuse(self, expected: str) -> NoReturn:
        token = self._token
        self._place.wrong(f"line {token.line} of the grammar: expected {expected}, found {token.text[:20]!r}")

    def _takes(self, symbol: str) -> bool:
        if self._token.kind == "symbol" and self._token.text == symbol:
            self._at += 1
            return True
        return False

    def definitions(self, start: str) -> Definitions:
        while self._token.kind != "end":
            if self._token.kind == "directive":
                self._directive()
            elif self._token.kind == "head":
                name = self._next().text.lstrip("?!")
                self._at += 1
                self._define(name, self._alternatives())
            else:
                form = "'name: …' (priorities and templates are not supported)" if self._is_lark else "'name ::= …'"
                self._refuse(f"a definition, which is {form}")
        if start not in self._rules and start:
            self._place.wrong(f"the grammar has no rule '{start}'")
        return Definitions(self._rules, self._terminals, tuple(self._ignored), start)

    def _define(self, name: str, node: Node) -> None:
        table = self._terminals if self._is_lark and is_terminal(name) else self._rules
        if name in table:
            self._place.wrong(f"the grammar defines '{name[:40]}' twice")
        self._place.check_at_most(len(self._rules) + len(self._terminals) + 1, _MAX_DEFINITIONS, "definitions")
        table[name] = node

    def _directive(self) -> None:
        name = self._token.text
        if name == "%ignore":
            self._at += 1
            self._ignored.append(self._alternatives())
        elif name == "%import":
            self._at += 1
            self._import()
        else:
            self._refuse("'%import common.…' or '%ignore' of the directives")

    def _import(self) -> None:
        if self._next().text != "common":
            self._at -= 1
            self._refuse("'common': other grammars cannot be imported")
        if self._takes("."):
            name = self._next().text
            alias = self._next().text[2:].strip() if self._token.kind == "alias" else name
            self._define_common(name, alias)
        elif self._takes("("):
            while not self._takes(")"):
                if self._token.kind != "name":
                    self._refuse("the names of terminals in parentheses")
                name = self._next().text
                self._define_common(name, name)
                self._takes(",")
        else:
            self._refuse("'.' and the name of a terminal")

    def _define_common(self, name: str, alias: str) -> None:
        common = _common()
        if name not in common:
            self._at -= 1
            self._refuse(f"one of common's terminals ({', '.join(one for one in common if one[0] != '_')})")
        self._define(alias, _inlined(common[name], common))

    def _alternatives(self) -> Node:
        self._depth += 1
        self._place.check_at_most(self._depth, MAX_DEPTH, "nested groups")
        if self._is_lark:
            self._takes("|")  # permitted before the first one
        parts = [self._sequence()]
        while self._takes("|"):
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Node("any", parts=tuple(parts))

    def _sequence(self) -> Node:
        parts = []
        while (part := self._part()) is not None:
            self._num_nodes += self._is_lark
            self._place.check_at_most(self._num_nodes, _MAX_NODES, "parts of a grammar")
            for _ in range(_MAX_REPEATS):
                if self._token.kind == "repeat":
                    part = self._repeated(part, self._next().text)
            parts.append(part)
        if self._token.kind == "alias":  # names a node of a parse tree
            self._at += 1
        return parts[0] if len(parts) == 1 else Node("all", parts=tuple(parts))

    def _repeated(self, node: Node, text: str) -> Node:
        if text in ("*", "+", "?"):
            return Node("times", parts=(node,), least=int(text == "+"), most=1 if text == "?" else None)
        counts = [int(count) for count in re.findall(r"\d+", text)]
        is_open = "," in text and len(counts) == 1
        least, most = counts[0], None if is_open else counts[-1]
        if most is not None and most < least:
            self._at -= 1
            self._refuse("a repetition whose largest count is not below its smallest")
        return Node("times", parts=(node,), least=least, most=most)

    def _part(self) -> Node | None:
        token = self._token
        if self._takes("("):
            inside = self._alternatives()
            if not self._takes(")"):
                self._refuse("')'")
            return inside
        if self._takes("["):
            inside = self._alternatives()
            if not self._takes("]"):
                self._refuse("']'")
            return Node("times", parts=(inside,), least=0)
        if token.kind == "name":
            self._at += 1
            return Node("name", token.text)
        if token.kind == "string":
            self._at += 1
            return self._range(token) if self._token.kind == "range" else self._string(token)
        if token.kind == "regex":
            self._at += 1
            return self._regex(token)
        if token.kind == "class":
            self._at += 1
            return Node("regex", _LONG_ESCAPE.sub(lambda match: f"\\u{{{int(match[1], 16):x}}}", token.text))
        if not self._is_lark and self._takes("."):
            return Node("regex", "[^\\n]")
        if token.kind in ("repeat", "range"):
            self._refuse("something to repeat or to match")
        return None

    def _string(self, token: _Token) -> Node:
        flags = "i" if token.text.endswith("i") else ""
        return Node("text", self._unescaped(token), flags)

    def _range(self, token: _Token) -> Node:
        self._at += 1
        last = self._next()
        low, high = self._unescaped(token), self._unescaped(last) if last.kind == "string" else ""
        if len(low) != 1 or len(high) != 1 or high < low:
            self._at -= 1
            self._refuse('a range of two characters in quotes, such as "a".."z"')
        return Node("regex", f"[\\u{{{ord(low):x}}}-\\u{{{ord(high):x}}}]")

    def _regex(self, token: _Token) -> Node:
        pattern, _, flags = token.text[1:].rpartition("/")
        if not _FLAGS.issuperset(flags):
            self._at -= 1
            self._refuse("a regular expression with no other flags than i and s")
        if (text := _ONE_CHARACTER.fullmatch(pattern)) is not None and not flags:
            return Node("text", _ESCAPES.get(text[2], text[1] or text[2]))
        return Node("regex", pattern, flags)

    def _unescaped(self, token: _Token) -> str:
        def replaced(match: re.Match[str]) -> str:
            digits = match.group(1) or match.group(2) or match.group(3)
            if not digits:
                return _ESCAPES.get(match.group(4), match.group(4))
            return chr(int(digits, 16)) if int(digits, 16) <= 0x10FFFF else "\ud800"

        text = _ESCAPE.sub(replaced, token.text.removesuffix("i")[1:-1])
        if any("\ud800" <= character < "\ue000" for character in text):
            self._place.wrong(f"line {token.line} of the grammar: an escape that is not a character")
        return text


def _common() -> dict[str, Node]:
    return _Parser(_COMMON, RequestPath("common"), is_lark=True).definitions("").terminals


def _inlined(node: Node, common: dict[str, Node]) -> Node:
    """The node with names replaced by their definitions."""
    if node.kind == "name":
        return _inlined(common[node.text], common)
    parts = tuple(_inlined(part, common) for part in node.parts)
    return Node(node.kind, node.text, node.flags, parts, node.least, node.most)
