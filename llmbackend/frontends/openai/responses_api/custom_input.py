"""The input of a custom tool's call, read out of the JSON text of its arguments as it comes.

For: output_builder.py. Models write calls of custom tools as calls of functions with one string parameter, `input`; a
client gets that string. Does not know: items, events. Invariant: the pieces put together do not depend on how the text
was cut, and hold no half character.
"""

from __future__ import annotations

import re

import orjson

from ..tools import INPUT

_OPENING = ("{", f'"{INPUT}"', ":", '"')
"""What stands before the string's characters; between these may be white space."""
_SPACE = " \t\r\n"
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_UNIT = re.compile(rf'[^"\\]+|{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\[^u]|"', re.DOTALL)
_MAY_GO_ON = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD][c-fC-F]?[0-9a-fA-F]?)?)?)?)?"
)
"""An escape that is cut off, and the first half of a pair."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class CustomInput:
    """One call's input. Owner: the builder of its output. Arguments of another form, which a model may write that is
    not held to a grammar, are the input as they stand."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        """As long as they may have another form."""
        self._token, self._matched_chars = 0, 0
        self._is_other_form = False
        self._held = ""
        self._is_closed = False

    def push(self, text: str) -> str:
        """The new characters of the input that the next piece of the arguments tells."""
        if self._token < len(_OPENING):
            self._arguments.append(text)
            text = self._open(text)
        return self._decoded(text) if text else ""

    def finish(self) -> str:
        """The rest, when the arguments have ended."""
        if self._token == len(_OPENING):
            return ""  # what is held back is half an escape
        return _of_other_form("".join(self._arguments))

    def _open(self, text: str) -> str:
        """Reads the opening; returns what stands behind it."""
        for index, char in enumerate(text):
            if self._is_other_form:
                return ""
            expected = _OPENING[self._token]
            if self._matched_chars == 0 and char in _SPACE:
                continue
            if char != expected[self._matched_chars]:
                self._is_other_form = True
                return ""
            self._matched_chars += 1
            if self._matched_chars == len(expected):
                self._token, self._matched_chars = self._token + 1, 0
            if self._token == len(_OPENING):
                self._arguments.clear()
                return text[index + 1 :]
        return ""

    def _decoded(self, text: str) -> str:
        if self._is_closed:
            return ""
        text, at, pieces = self._held + text, 0, []
        while at < len(text):
            if _MAY_GO_ON.fullmatch(text, at):
                break
            unit = _UNIT.match(text, at)
            if unit is None:  # \u without four digits: no JSON, shown as it stands
                pieces.append(text[at])
                at += 1
                continue
            at = unit.end()
            if unit[0] == '"':
                self._is_closed = True
                at = len(text)
            else:
                pieces.append(_unescaped(unit[0]))
        self._held = text[at:]
        return "".join(pieces)


def _unescaped(unit: str) -> str:
    if unit[0] != "\\":
        return unit
    if unit[1] != "u":
        return _ESCAPES.get(unit[1], unit[1])
    if len(unit) > 6:
        return chr(0x10000 + ((int(unit[2:6], 16) - 0xD800) << 10) + int(unit[8:], 16) - 0xDC00)
    char = chr(int(unit[2:], 16))
    return "\ufffd" if "\ud800" <= char <= "\udfff" else char


def _of_other_form(arguments: str) -> str:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return "" if _is_begun(arguments) else arguments
    if value == {}:
        return ""
    found = value.get(INPUT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def _is_begun(arguments: str) -> bool:
    """Whether they were cut off before the first character of the input."""
    return "".join(_OPENING).startswith("".join(arguments.split()))
