"""How the characters of a text are spelled where the text stands: as they are, or as in a JSON string.

For: regular expressions and grammars of texts that stand inside something else. Does not know: what is matched.
Invariant: a character has one spelling, so that a text read back from its spelling is the text that was matched.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


def character(code_point: int) -> str:
    """One character of a regular expression, wherever it stands."""
    shown = chr(code_point)
    return shown if shown.isascii() and shown.isalnum() else f"\\u{{{code_point:x}}}"


@dataclass(frozen=True, slots=True)
class Spelling:
    escapes: dict[str, str]
    """By character: what stands for it."""
    unspeakable: str = ""
    """Characters that have no spelling."""

    def has(self, text: str) -> bool:
        """Whether the text can be spelled."""
        return not any(one in self.unspeakable for one in text)

    def text(self, text: str) -> str:
        return "".join(self.escapes.get(one, one) for one in text)

    def pattern(self, text: str) -> str:
        """A regular expression of the text. Escapes are in their own case also where case is ignored."""
        return "".join(self._one(one) for one in text)

    def character_class(self, items: str, holds: Callable[[str], bool]) -> str:
        """A regular expression of one character of a class.

        items: the class in the compiler's syntax, brackets included
        holds: whether it has an ASCII character
        """
        if not self.escapes:
            return items
        special = "".join(character(ord(one)) for one in (*self.escapes, *self.unspeakable))
        escaped = [self._one(one) for one in self.escapes if holds(one)]
        return f"(?:{'|'.join((f'[{items}&&[^{special}]]', *escaped))})"

    def _one(self, one: str) -> str:
        if one not in self.escapes:
            return character(ord(one))
        return f"(?-i:{''.join(character(ord(part)) for part in self.escapes[one])})"


AS_IT_IS: Final = Spelling({})
_JSON_ESCAPES = {one: json.dumps(one)[1:-1] for one in '"\\\b\f\n\r\t'}
IN_JSON: Final = Spelling(_JSON_ESCAPES, "".join(chr(one) for one in range(32) if chr(one) not in _JSON_ESCAPES))
"""With JSON's short escapes alone: other control characters have no spelling."""


def category_holds(name: str, one: str) -> bool | None:
    """Whether a Unicode general category has the character; None where `name` is none."""
    if len(name) > 2 or not name.isalpha():
        return None
    return unicodedata.category(one).startswith(name.capitalize())
