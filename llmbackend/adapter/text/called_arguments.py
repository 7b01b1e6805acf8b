"""The arguments of a tool call in a conversation, as chat templates read them: as an object and as its JSON text.

For: chat.py. Does not know: messages. Invariant: as text they are what the client sent, character by character. The
templates of some models (DeepSeek's) join the text with `+`, others (Qwen's, GLM's) go through the object's items.
"""

from __future__ import annotations

import json
from typing import Any


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
