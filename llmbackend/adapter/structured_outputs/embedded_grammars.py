"""Embeds a client's grammar or regular expression in another grammar: unchanged, as text up to an end marker, or as the
content of a JSON string.

Used by compilation.py and structural tags. Independent of tools. Invariants: the embedded part is a text of the
client's grammar, spelled for its surroundings; when embedded as text, it never contains anything that would end it
early, whether in one terminal or across several. Non-recursive parts become a single terminal, because the compiler's
longest match could otherwise cut them where the grammar would not; a recursive grammar that such a cut would make
impossible to follow is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from . import regular_expressions
from .constraint import MAX_REGEX_LENGTH, RequestPath
from .grammar_parser import Definitions, Node, is_terminal, names, parse_ebnf, parse_lark
from .lark import NOTHING, Rules, literal, without
from .regular_expressions import AS_IT_IS, IN_JSON, Spelling

NOTHING_NODE: Final = Node("all")
END: Final = ""
"""Represents the end of the text in a set of characters that may follow."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a text is embedded in."""

    spelling: Spelling = IN_JSON
    end: str = ""
    """The text that ends it; "" if its spelling already shows the end."""
    excluded: tuple[str, ...] = ()
    """Other texts that would end it."""

    @property
    def forbidden(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.excluded, *((self.end,) if self.end else ()))))


def as_text(end: str, excluded: tuple[str, ...]) -> Surroundings:
    return Surroundings(AS_IT_IS, end, excluded)


IN_JSON_STRING: Final = Surroundings()
_ALONE: Final = Surroundings(AS_IT_IS)


def embedded_regex(pattern: str, place: RequestPath, rules: Rules, around: Surroundings) -> str:
    """The body of the text and that of its end. Raises TritonError INVALID_ARG."""
    text, _ = regular_expressions.spelled(pattern, place, around.spelling)
    return _with_end(f"/{text}/", rules, around)


def embedded_lark(text: str, place: RequestPath, rules: Rules, around: Surroundings) -> str:
    """The body of the text and that of its end. Raises TritonError INVALID_ARG."""
    found = parse_lark(text, place)
    return _Writer(_with_ignored(found), found.start, place, rules, around, found.terminals.keys()).write()


def ebnf(text: str, place: RequestPath, rules: Rules) -> str:
    """The body of the text. Raises TritonError INVALID_ARG."""
    found = parse_ebnf(text, place)
    return _Writer(found.rules, found.start, place, rules, _ALONE).write()


def _with_end(body: str, rules: Rules, around: Surroundings) -> str:
    """A text that is a single terminal, and its end, combined into one lexeme: the text may begin like the end."""
    name = rules.terminal(body)
    if not around.forbidden:
        return name
    if not around.end:
        return rules.terminal(f"{name} & ({without(around.forbidden)})")
    alternatives = [rules.terminal(f"({name} & ({without(around.forbidden)})) {literal(around.end)}")]
    if (marker := rules.special_marker(around.end)) is not None:
        before = rules.terminal(f"{name} & ({without(around.excluded)})") if around.excluded else name
        alternatives.append(f"{before} {marker}")
    return f"({' | '.join(alternatives)})"


def _with_ignored(found: Definitions) -> dict[str, Node]:
    """All definitions, with ignored terminals permitted before the first and after each terminal of the rules."""
    if not found.ignored:
        return found.terminals | found.rules
    between = Node("times", parts=(Node("any", parts=found.ignored),), least=0, most=None)

    def spaced(node: Node) -> Node:
        if node.kind in ("text", "regex") or (node.kind == "name" and is_terminal(node.text)):
            return Node("all", parts=(node, between))
        return Node(node.kind, node.text, node.flags, tuple(map(spaced, node.parts)), node.least, node.most)

    rules = {name: spaced(node) for name, node in found.rules.items()}
    return found.terminals | rules | {found.start: Node("all", parts=(between, rules[found.start]))}


class _Writer:
    def __init__(
        self,
        definitions: Mapping[str, Node],
        start: str,
        place: RequestPath,
        rules: Rules,
        around: Surroundings,
        terminals: Collection[str] = (),
    ) -> None:
        """terminals: names of definitions that must not be recursive"""
        self.definitions = definitions
        self.start = start
        self.around = around
        self._never_recursive = terminals
        self._place = place
        self._rules = rules
        uses = {name: dict.fromkeys(names(node)) for name, node in definitions.items()}
        reached = {name: _reached(name, uses) for name in definitions}
        looped = {name for name, used in reached.items() if name in used}
        self._reached_from_start = [start, *(name for name in reached[start] if name != start)]
        self._recursive = {name for name in definitions if name in looped or not looped.isdisjoint(reached[name])}
        self._watched = frozenset("".join(around.forbidden)) | around.spelling.escapes.keys()
        self._rule_names: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        """By body."""
        self._texts: dict[str, str] = {}
        self._held: dict[str, frozenset[str]] = {}
        self._constants: dict[str, str | None] = {}
        self._lengths: dict[str, int] = {}
        self._used: dict[Node, str] = {}
        self._beginnings = _beginnings(around.forbidden)
        self._followers: _Followers | None = None

    def write(self) -> str:
        """Writes everything reachable from the start. Returns the body of the text and that of its end."""
        for name in self._reached_from_start:
            if name not in self._recursive:
                self._check_length(Node("name", name))
            elif name in self._never_recursive:
                self._place.wrong(f"the grammar's terminal '{name[:40]}' uses itself, expected a rule")
        if self.start not in self._recursive:
            return _with_end(self._text(Node("name", self.start)), self._rules, self.around)
        recursive = [name for name in self._reached_from_start if name in self._recursive]
        if self._watched:
            self._followers = _Followers({name: self.definitions[name] for name in recursive}, self)
        self._rule_names = {name: self._rules.new_name() for name in recursive}
        for name in recursive:
            self._rules.define(self._rule_names[name], self._body(self.definitions[name]))
        end = self._rules.marker(self.around.end) if self.around.end else ""
        return f"{self._rule_names[self.start]} {end}"

    def is_text(self, node: Node) -> bool:
        """Whether it can be written as a terminal, that is, contains no recursion."""
        if node.kind == "name":
            return node.text not in self._recursive
        return all(map(self.is_text, node.parts))

    # --- rules --------------------------------------------------------------------------------------------------------

    def _body(self, node: Node) -> str:
        if self.is_text(node):
            return self._use(node) if node != NOTHING_NODE else NOTHING
        if node.kind == "name":
            return self._rule_names[node.text]
        return _joined(node, [self._body(part) for part in self.parts(node)])

    def parts(self, node: Node) -> tuple[Node, ...]:
        """The parts, with each run of terminals in a sequence combined into one."""
        if node.kind != "all":
            return node.parts
        parts: list[Node] = []
        for is_text, run in itertools.groupby(node.parts, self.is_text):
            members = tuple(run)
            parts += (Node("all", parts=members),) if is_text and len(members) > 1 else members
        return tuple(parts)

    def _use(self, node: Node) -> str:
        """A terminal's name, for use in a rule."""
        if node not in self._used:
            self._used[node] = self._added_terminal(node)
        return self._used[node]

    def _added_terminal(self, node: Node) -> str:
        self._check_length(node)
        body = self._text(node)
        if self._followers is None:
            return self._named(body)
        followers = self._followers.behind[node]
        if (text := self.constant(node)) is not None:
            self._check_constant(text, followers)
            return self._named(body)
        self._check_longest_match(node, followers)
        bad_endings = [one for one, next_ones in self._beginnings.items() if not followers.isdisjoint(next_ones)]
        return self._limited(body, bad_endings)

    def _check_longest_match(self, node: Node, followers: frozenset[str]) -> None:
        """A terminal's match is the longest one, so it would extend into the following text if it may contain that
        text's first character and the text has more than one."""
        end, escaped = self.around.end, self.around.spelling.escapes.keys()
        if END in followers and end and end[0] in self.held(node) and self._rules.special_marker(end) is None:
            self._place.wrong(
                f"the grammar is recursive, and {_shown(node)}, which may come last, may contain {end[0]!r}, with "
                f"which the end {end!r} begins: expected a grammar whose last part cannot contain this character"
            )
        if self.held(node) & escaped and followers & escaped:
            self._place.wrong(
                f"the grammar is recursive, and both {_shown(node)} and the text after it may contain characters that "
                "JSON escapes: expected a grammar in which only one of the two may, or one without recursion"
            )

    def _check_constant(self, text: str, followers: frozenset[str]) -> None:
        for forbidden in self.around.forbidden:
            if forbidden in text:
                self._place.wrong(f"its text {text[:40]!r} contains {forbidden!r}, which would end it")
        longest = max(map(len, self.around.forbidden), default=0)
        for ending in (text[-length:] for length in range(1, min(len(text), longest) + 1)):
            if not followers.isdisjoint(self._beginnings.get(ending, ())):
                self._place.wrong(
                    f"its text {text[:40]!r} ends with {ending!r}, and the text after it may complete that to one that "
                    "would end it"
                )

    def _named(self, body: str) -> str:
        """The name of a terminal."""
        if body not in self._terminals:
            self._terminals[body] = self._rules.terminal(body)
        return self._terminals[body]

    def _limited(self, body: str, bad_endings: Sequence[str]) -> str:
        """A terminal for texts that neither contain an end nor finish with one of `bad_endings`."""
        if not self.around.forbidden:
            return self._named(body)
        inside = " | ".join(map(literal, self.around.forbidden))
        forbidden = f"/(?s:.*)/ ({inside}) /(?s:.*)/"
        if bad_endings:
            forbidden += f" | /(?s:.*)/ ({' | '.join(map(literal, bad_endings))})"
        return self._named(f"{self._named(body)} & ~({forbidden})")

    # --- terminals ----------------------------------------------------------------------------------------------------

    def _text(self, node: Node) -> str:
        """The body of a terminal."""
        if node.kind == "name":
            if node.text not in self._texts:
                self._texts[node.text] = self._named(self._text(self.definitions[node.text]))
            return self._texts[node.text]
        if node.kind == "regex":
            return f"/{self._spelled(node, frozenset())[0]}/"
        if node.kind != "text":
            return _joined(node, [self._text(part) for part in node.parts])
        if not self.around.spelling.has(node.text):
            self._place.wrong(f"its text {node.text[:40]!r} holds a control character that has no short escape in JSON")
        if not node.flags or not node.text:
            return literal(self.around.spelling.text(node.text))
        return f"/(?i:{self.around.spelling.pattern(node.text)})/"

    def _spelled(self, node: Node, watched: frozenset[str]) -> tuple[str, frozenset[str]]:
        return regular_expressions.spelled(node.text, self._place, self.around.spelling, node.flags, watched)

    def _check_length(self, node: Node) -> int:
        """Returns a terminal's characters with repetitions expanded; the compiler creates a state for each."""
        if node.kind == "name":
            if node.text not in self._lengths:
                self._lengths[node.text] = self._check_length(self.definitions[node.text])
            return self._lengths[node.text]
        length = max(sum(map(self._check_length, node.parts)), len(node.text), 1)
        if node.kind == "times":
            length *= max(node.least, node.most or 1, 1)
        self._place.check_at_most(length, MAX_REGEX_LENGTH, "characters with repetitions written out")
        return length

    def held(self, node: Node) -> frozenset[str]:
        """The watched characters that a terminal may contain."""
        if node.kind == "name":
            if node.text not in self._held:
                self._held[node.text] = self.held(self.definitions[node.text])
            return self._held[node.text]
        if node.kind == "text":
            return self._watched.intersection(node.text + (node.text.swapcase() if node.flags else ""))
        if node.kind == "regex":
            return self._spelled(node, self._watched)[1]
        return frozenset().union(*map(self.held, node.parts))

    def constant(self, node: Node) -> str | None:
        """A terminal's only text; None if there are several."""
        if node.kind == "name":
            if node.text not in self._constants:
                self._constants[node.text] = self.constant(self.definitions[node.text])
            return self._constants[node.text]
        if node.kind == "all":
            parts = [self.constant(part) for part in node.parts]
            return None if None in parts else "".join(part or "" for part in parts)
        return node.text if node.kind == "text" and not node.flags else None

    def first(self, node: Node) -> tuple[frozenset[str], bool]:
        """The watched characters with which a terminal may begin (a superset), and whether it may be empty."""
        text = self.constant(node)
        return (self.held(node), True) if text is None else (frozenset(text[:1]), not text)


class _Followers:
    """The characters, or END, that may follow each terminal in a grammar's rules: a superset (a fixed point)."""

    def __init__(self, rules: Mapping[str, Node], writer: _Writer) -> None:
        self._rules = rules
        self._writer = writer
        self._first: dict[str, tuple[frozenset[str], bool]] = dict.fromkeys(rules, (frozenset(), False))
        self._behind_rule: dict[str, frozenset[str]] = dict.fromkeys(rules, frozenset())
        self.behind: dict[Node, frozenset[str]] = {}
        """Of each terminal: the union over all its uses."""
        while self._grow_first():
            pass
        self._behind_rule[writer.start] = frozenset((END, writer.around.end[:1]))
        while self._grow_followers():
            pass

    def _grow_first(self) -> bool:
        before = dict(self._first)
        self._first = {name: self._first_of(node) for name, node in self._rules.items()}
        return self._first != before

    def _first_of(self, node: Node) -> tuple[frozenset[str], bool]:
        if self._writer.is_text(node):
            return self._writer.first(node)
        if node.kind == "name":
            return self._first[node.text]
        parts = [self._first_of(part) for part in self._writer.parts(node)]
        if node.kind == "any":
            return frozenset().union(*(first for first, _ in parts)), any(empty for _, empty in parts)
        if node.kind == "times":
            return parts[0][0], parts[0][1] or not node.least
        found: frozenset[str] = frozenset()
        for first, may_be_empty in parts:
            found |= first
            if not may_be_empty:
                return found, False
        return found, True

    def _grow_followers(self) -> bool:
        before = dict(self._behind_rule), dict(self.behind)
        for name, node in self._rules.items():
            self._visit(node, self._behind_rule[name])
        return (self._behind_rule, self.behind) != before

    def _visit(self, node: Node, behind: frozenset[str]) -> None:
        if self._writer.is_text(node):
            self.behind[node] = self.behind.get(node, frozenset()) | behind
        elif node.kind == "name":
            self._behind_rule[node.text] |= behind
        elif node.kind == "all":
            for part in reversed(self._writer.parts(node)):
                self._visit(part, behind)
                first, may_be_empty = self._first_of(part)
                behind = first | behind if may_be_empty else first
        else:
            again = self._first_of(node.parts[0])[0] if node.kind == "times" and node.most != 1 else frozenset[str]()
            for part in node.parts:
                self._visit(part, behind | again)


def _beginnings(texts: Iterable[str]) -> dict[str, set[str]]:
    """The beginnings of the texts, each with the characters that come next in one of them."""
    found: dict[str, set[str]] = {}
    for text in texts:
        for length in range(1, len(text)):
            found.setdefault(text[:length], set()).add(text[length])
    return found


def _reached(name: str, uses: Mapping[str, Iterable[str]]) -> dict[str, None]:
    """The definitions that a definition uses directly or indirectly, in order of first use; also itself if
    recursive."""
    seen: dict[str, None] = {}
    waiting = [name]
    while waiting:
        for used in uses.get(waiting.pop(), ()):
            if used not in seen:
                seen[used] = None
                waiting.append(used)
    return seen


def _joined(node: Node, parts: list[str]) -> str:
    if node.kind == "times":
        return f"({parts[0]}){_count(node)}"
    if node.kind == "any":
        return f"({' | '.join(part or NOTHING for part in parts)})"
    return f"({' '.join(parts)})" if parts else NOTHING


def _count(node: Node) -> str:
    if node.most is None:
        return {0: "*", 1: "+"}.get(node.least, f"{{{node.least},}}")
    return "?" if (node.least, node.most) == (0, 1) else f"{{{node.least},{node.most}}}"


def _shown(node: Node) -> str:
    """Its last part that has a text or a name."""
    if node.kind == "regex":
        return f"/{node.text[:40]}/"
    return _shown(node.parts[-1]) if node.parts else f"'{node.text[:40]}'"
