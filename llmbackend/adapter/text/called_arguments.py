"""The arguments of a tool call in a conversation, as chat templates read them: as an object and as its JSON text.

For: chat.py. Does not know: messages. Invariant: as text they are what the client sent, character by character. The
templates of some models (DeepSeek's) join the text with `+`, others (Qwen's, GLM's) go through the object's items.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

UNREADABLE: Final = "arguments"
"""The parameter whose value is a text of arguments that are no object."""


def called_arguments(sent: object) -> object:
    """The arguments of a call as it was sent: an object, its JSON text, or the text that a model wrote instead."""
    if sent is None or sent == "":
        return CalledArguments({})
    if isinstance(sent, dict):
        return CalledArguments(sent)
    if not isinstance(sent, str):
        return sent
    try:
        arguments = json.loads(sent)
    except (ValueError, RecursionError):
        arguments = None
    return CalledArguments(arguments, sent) if isinstance(arguments, dict) else UnreadableArguments(sent)


class CalledArguments(dict[str, Any]):
    """An object that is its JSON text where a template puts it into text. Must not be changed."""

    __slots__ = ("_text",)

    def __init__(self, arguments: dict[str, Any], text: str | None = None) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        if self._text is None:
            self._text = json.dumps(self, ensure_ascii=False)
        return self._text

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class UnreadableArguments(str):
    """A text that is no JSON object, such as arguments that were cut off: the text itself, and to a template that goes
    through an object's items, one parameter that has it."""

    __slots__ = ()

    def items(self) -> list[tuple[str, str]]:
        return [(UNREADABLE, str(self))]

    def keys(self) -> list[str]:
        return [UNREADABLE]

    def values(self) -> list[str]:
        return [str(self)]

    def get(self, name: str, default: Any = None) -> Any:
        return str(self) if name == UNREADABLE else default

    def __iter__(self) -> Iterator[str]:
        return iter((UNREADABLE,))

    def __getitem__(self, name: Any) -> str:
        return str(self) if name == UNREADABLE else str(self)[name]

    def __str__(self) -> str:
        return str.__str__(self)
