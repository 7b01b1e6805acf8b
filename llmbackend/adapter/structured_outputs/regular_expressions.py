"""Translates clients' regular expressions (ECMA-262, as in JSON Schema) to the compiler's syntax, which is Rust's.

Used for schema patterns, regex constraints and grammar terminals. Independent of schemas and grammars. Invariants:
whatever the result matches is matched by the client's expression both under ECMA-262 and under Python's `re`; where
they differ (`.`, \\d, \\s and \\w) the result is their intersection. Anything that requires lookaround is refused by
name. In a text embedded in another one, each character has exactly one Spelling, so that the text can be read back.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

from .constraint import MAX_DEPTH, MAX_REGEX_CHARS, MAX_REGEX_LENGTH, RequestPath

_LINE_ENDS = "\n\r\u2028\u2029"
_ANY = r"[\u{0}-\u{10ffff}]"
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\u{b}\u{c}\r\u{20}"}
"""Digits, word characters and spaces common to all dialects."""
_WIDE = {"d": r"\p{Nd}", "w": r"\p{L}\p{M}\p{N}\p{Pc}", "s": r"\p{Z}\u{9}-\u{d}\u{1c}-\u{1f}\u{85}\u{feff}"}
"""The union over all dialects; without \\w and the like, which are ASCII-only in the compiler."""
_CONTROL = {"n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B, "f": 0x0C, "0": 0x00}
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MAX_CODE_POINT = 0x10FFFF
_GROUPS = ("?:", "?<", "?P<")


def character(code_point: int) -> str:
    """A character in a regular expression, valid in any position."""
    shown = chr(code_point)
    return shown if shown.isascii() and shown.isalnum() else f"\\u{{{code_point:x}}}"


@dataclass(frozen=True, slots=True)
class Spelling:
    escapes: dict[str, str]
    """By character."""
    unspellable: str = ""
    """Characters that have no spelling."""

    def has(self, text: str) -> bool:
        """Whether the text can be spelled."""
        return not any(one in self.unspellable for one in text)

    def text(self, text: str) -> str:
        return "".join(self.escapes.get(one, one) for one in text)

    def pattern(self, text: str) -> str:
        """A regular expression for the text. Escapes keep their case even if case is ignored."""
        return "".join(self._one(one) for one in text)

    def character_class(self, items: str, holds: Callable[[str], bool]) -> str:
        """A regular expression for one character of a class.

        items: the class in the compiler's syntax, including brackets
        holds: whether it contains an ASCII character
        """
        if not self.escapes:
            return items
        special = "".join(character(ord(one)) for one in (*self.escapes, *self.unspellable))
        escaped = [self._one(one) for one in self.escapes if holds(one)]
        return f"(?:{'|'.join((f'[{items}&&[^{special}]]', *escaped))})"

    def _one(self, one: str) -> str:
        if one not in self.escapes:
            return character(ord(one))
        return f"(?-i:{''.join(character(ord(part)) for part in self.escapes[one])})"


AS_IT_IS: Final = Spelling({})
_JSON_ESCAPES = {one: json.dumps(one)[1:-1] for one in '"\\\b\f\n\r\t'}
IN_JSON: Final = Spelling(_JSON_ESCAPES, "".join(chr(one) for one in range(32) if chr(one) not in _JSON_ESCAPES))
"""With JSON's short escapes only: other control characters have no spelling."""


def category_holds(name: str, one: str) -> bool | None:
    """Whether the character is in the Unicode general category `name`; None if there is no such category."""
    if len(name) > 2 or not name.isalpha():
        return None
    return unicodedata.category(one).startswith(name.capitalize())


def searched(pattern: str, place: RequestPath) -> str:
    """An expression to be searched for in a string, like JSON Schema's `pattern`: anchors are kept."""
    return _Translation(pattern, place, keep_anchors=True).result()


def whole(pattern: str, place: RequestPath) -> str:
    """An expression that must match the whole text. Anchors at the ends of its alternatives are redundant."""
    return _Translation(pattern, place, keep_anchors=False).result()


def spelled(
    pattern: str, place: RequestPath, spelling: Spelling, flags: str = "", watched: frozenset[str] = frozenset()
) -> tuple[str, frozenset[str]]:
    """Like `whole`, for a spelled text, in Lark's dialect: Python's, where `.` is anything but the newline. flags: "i"
    and "s". Also returns the `watched` ASCII characters that the text may contain."""
    not_dot = "" if "s" in flags else "\n"
    both_cases = {case for one in watched for case in (one.lower(), one.upper())} if "i" in flags else watched
    translation = _Translation(pattern, place, keep_anchors=False, spelling=spelling, not_dot=not_dot)
    translation.watched = frozenset(both_cases)
    text = translation.result()
    if "i" not in flags:
        return text, frozenset(translation.held)
    lower = {one.lower() for one in translation.held}
    return f"(?i:{text})", frozenset(one for one in watched if one.lower() in lower)


_Item = tuple[str, Callable[[str], bool]]
"""A set of characters in the compiler's syntax, and a test whether it contains an ASCII character."""


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    length: int
    """Characters, with repetitions expanded."""


class _Translation:
    def __init__(
        self,
        pattern: str,
        place: RequestPath,
        *,
        keep_anchors: bool,
        spelling: Spelling = AS_IT_IS,
        not_dot: str = _LINE_ENDS,
    ) -> None:
        """not_dot: characters not matched by `.`"""
        place.check_at_most(len(pattern), MAX_REGEX_CHARS, "characters of a regular expression")
        self._pattern = pattern
        self._place = place
        self._keep_anchors = keep_anchors
        self._at = 0
        self._depth = 0
        self._spelling = spelling
        self._not_dot = not_dot
        self.watched: frozenset[str] = frozenset()
        self.held: set[str] = set()
        """The watched characters that any part may match."""

    def result(self) -> str:
        part = self._alternatives()
        if self._at < len(self._pattern):
            self._refuse("an unmatched ')'")
        self._place.check_at_most(part.length, MAX_REGEX_LENGTH, "characters with repetitions written out")
        return part.text

    def _refuse(self, what: str) -> NoReturn:
        self._place.wrong(f"{what} in the regular expression at character {self._at} is not supported")

    def _peek(self, length: int = 1) -> str:
        return self._pattern[self._at : self._at + length]

    def _take(self) -> str:
        taken = self._peek()
        if not taken:
            self._refuse("an unfinished expression")
        self._at += 1
        return taken

    def _skip(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        return _Part("|".join(part.text for part in parts), sum(part.length for part in parts) + len(parts))

    def _sequence(self) -> _Part:
        texts, length, start = [], 0, self._at
        while self._peek() not in ("", "|", ")"):
            if self._peek() in ("^", "$"):
                texts.append(self._anchor(self._at == start))
                continue
            part = self._quantified(self._atom())
            texts.append(part.text)
            length += part.length
            if length > MAX_REGEX_LENGTH:
                self._place.check_at_most(length, MAX_REGEX_LENGTH, "characters with repetitions written out")
        return _Part("".join(texts), length)

    def _anchor(self, is_first: bool) -> str:
        anchor = self._take()
        if self._peek() in ("*", "+", "?", "{"):
            self._refuse("a repeated anchor")
        if self._keep_anchors:
            return anchor
        if self._depth or not (is_first if anchor == "^" else self._peek() in ("", "|")):
            self._refuse(f"'{anchor}' inside the expression")
        return ""

    def _atom(self) -> _Part:
        symbol = self._take()
        if symbol == "(":
            return self._group()
        if symbol == "[":
            return _Part(self._class(), 1)
        if symbol == ".":
            items = "".join(character(ord(one)) for one in self._not_dot)
            return _Part(self._one_of(f"[^{items}]" if items else _ANY, lambda one: one not in self._not_dot), 1)
        if symbol == "\\":
            return _Part(self._escape(), 1)
        if symbol in "*+?":
            self._at -= 1
            self._refuse(f"'{symbol}' that repeats nothing")
        return _Part(self._character(ord(symbol)), 1)

    def _character(self, code_point: int) -> str:
        one = chr(code_point)
        if not self._spelling.has(one):
            self._refuse(f"the character {one!r}, which has no short escape in JSON,")
        self.held |= self.watched & {one}
        return self._spelling.pattern(one)

    def _one_of(self, items: str, holds: Callable[[str], bool]) -> str:
        """One character of a class. items: in the compiler's syntax, with brackets; holds: tests an ASCII character"""
        self.held |= {one for one in self.watched if holds(one)}
        return self._spelling.character_class(items, holds)

    def _group(self) -> _Part:
        if self._peek() == "?":
            kind = next((start for start in _GROUPS if self._pattern.startswith(start, self._at)), "")
            if not kind or (kind == "?<" and self._peek(3) in ("?<=", "?<!")):
                self._refuse(f"'({self._peek(3)}'")
            self._at += len(kind)
            if kind != "?:":
                end = self._pattern.find(">", self._at)
                if end < 0 or not self._pattern[self._at : end].isidentifier():
                    self._refuse("the name of a group")
                self._at = end + 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._place.check_at_most(self._depth, MAX_DEPTH, "nested groups")
        inside = self._alternatives()
        if not self._skip(")"):
            self._refuse("a group without ')'")
        self._depth -= 1
        return _Part(f"(?:{inside.text})", inside.length)

    def _quantified(self, part: _Part) -> _Part:
        least, most = self._quantifier()
        if (least, most) == (1, 1):
            return part
        if most is not None and most < least:
            self._refuse(f"a repetition from {least} to {most} times")
        if self._peek() in ("+", "*", "?"):
            if not self._skip("?"):  # a lazy quantifier matches the same strings
                self._refuse("a repeated repetition")
        elif self._peek() == "{":
            self._refuse("a repeated repetition")
        times = max(least, most or 1, 1)
        length = min(part.length * times, MAX_REGEX_LENGTH + 1)
        return _Part(f"(?:{part.text}){{{least},{'' if most is None else most}}}", length)

    def _quantifier(self) -> tuple[int, int | None]:
        if self._peek() and self._peek() in _QUANTIFIERS:
            return _QUANTIFIERS[self._take()]
        if self._peek() != "{":
            return 1, 1
        end = self._pattern.find("}", self._at)
        least, comma, most = self._pattern[self._at + 1 : end].partition(",")
        numbers = [number for number in (least, most) if number]
        if end < 0 or not least or not all(n.isascii() and n.isdigit() and len(n) < 8 for n in numbers):
            self._refuse("'{' that begins no repetition (write it as '\\{')")
        self._at = end + 1
        return int(least), int(least) if not comma else int(most) if most else None

    def _escape(self) -> str:
        """The escape after a backslash outside a class."""
        symbol = self._peek()
        if symbol and symbol in "dwsDWS":
            self._at += 1
            return self._one_of(f"[{_kind(symbol, is_excluded=False)}]", partial(_kind_holds, symbol))
        if symbol and symbol in "pP":
            text, holds = self._property()
            return self._one_of(f"[{text}]", holds)
        return self._character(self._escaped_code_point())

    def _property(self) -> _Item:
        letter = self._take()
        end = self._pattern.find("}", self._at)
        name = self._pattern[self._at + 1 : end]
        if self._peek() != "{" or end < 0 or not name.replace("_", "").replace("=", "").isalnum():
            self._refuse("a Unicode property without its name in braces")
        self._at = end + 1

        def holds(one: str) -> bool:
            is_member = category_holds(name, one)
            if is_member is None:
                self._refuse(f"the Unicode property '{name[:40]}', which is no general category,")
            return bool(is_member) == (letter == "p")

        return f"\\{letter}{{{name}}}", holds

    def _escaped_code_point(self) -> int:
        symbol = self._take()
        if symbol in _CONTROL and not (symbol == "0" and self._peek().isdigit()):
            return _CONTROL[symbol]
        if symbol == "c" and self._peek().isascii() and self._peek().isalpha():
            return ord(self._take()) % 32
        if symbol == "x":
            return self._hexadecimal(2)
        if symbol == "u":
            return self._unicode_escape()
        if symbol.isalnum() or not symbol.isascii():
            self._refuse(f"'\\{symbol}'")
        return ord(symbol)

    def _unicode_escape(self) -> int:
        if self._skip("{"):
            end = self._pattern.find("}", self._at)
            code_point = self._hexadecimal(end - self._at if 0 < end - self._at <= 6 else 0)
            self._at += 1
            return code_point
        code_point = self._hexadecimal(4)
        if 0xD800 <= code_point < 0xDC00 and self._skip("\\u"):
            low = self._hexadecimal(4)
            code_point = 0x10000 + ((code_point - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= code_point < 0xE000 or code_point > _MAX_CODE_POINT:
            self._refuse("half of a surrogate pair")
        return code_point

    def _hexadecimal(self, length: int) -> int:
        digits = self._peek(length)
        if not length or len(digits) != length or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            self._refuse("an escape without its hexadecimal digits")
        self._at += length
        code_point = int(digits, 16)
        if code_point > _MAX_CODE_POINT:
            self._refuse("a character beyond Unicode")
        return code_point

    def _class(self) -> str:
        is_excluded = self._skip("^")
        items: list[str] = []
        parts: list[Callable[[str], bool]] = []
        while not self._skip("]"):
            low = self._class_item(is_excluded)
            if isinstance(low, int) and self._peek() == "-" and self._peek(2) not in ("-]", "-"):
                self._at += 1
                high = self._class_item(is_excluded)
                if not isinstance(high, int) or high < low:
                    self._refuse("a range of characters in descending order, or of sets,")
                items.append(f"{character(low)}-{character(high)}")
                parts.append(partial(_is_between, low, high))
            elif isinstance(low, int):
                items.append(character(low))
                parts.append(partial(_is_between, low, low))
            else:
                items.append(low[0])
                parts.append(low[1])
        if not items and not is_excluded:
            self._refuse("an empty class of characters")
        whole_class = f"[{'^' if is_excluded else ''}{''.join(items)}]" if items else _ANY
        return self._one_of(whole_class, lambda one: any(holds(one) for holds in parts) != is_excluded)

    def _class_item(self, is_excluded: bool) -> int | _Item:
        """A code point, or a set."""
        symbol = self._take()
        if symbol == "[":  # Python warns about it; newer dialects nest classes
            return ord(symbol)
        if symbol != "\\":
            return ord(symbol)
        symbol = self._peek()
        if symbol and symbol in "dwsDWS":
            self._at += 1
            return _kind(symbol, is_excluded), partial(_kind_holds, symbol)
        if symbol and symbol in "pP":
            return self._property()
        if symbol == "b":
            self._at += 1
            return 0x08
        return self._escaped_code_point()


def _kind(letter: str, is_excluded: bool) -> str:
    """Digits, word characters or spaces, or their complement, as items of a class; of any dialect if negated."""
    if letter.islower():
        return (_WIDE if is_excluded else _NARROW)[letter]
    return f"[^{(_NARROW if is_excluded else _WIDE)[letter.lower()]}]"


def _kind_holds(letter: str, one: str) -> bool:
    """Whether it contains an ASCII character. Dialects differ only on four separators, which are never watched."""
    if letter in "dD":
        is_member = one.isdigit()
    elif letter in "wW":
        is_member = one.isalnum() or one == "_"
    else:
        is_member = one in "\t\n\v\f\r "
    return is_member == letter.islower()


def _is_between(low: int, high: int, one: str) -> bool:
    return low <= ord(one) <= high
