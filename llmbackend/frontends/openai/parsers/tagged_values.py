"""Makes JSON of a value that the model writes as text between tags.

For: the readers of tagged calls. Does not know: tags. Invariant: a value that can only be a string is passed on at
once; any other waits for its end, up to MAX_HELD_CHARS, and is a string if it is longer.
"""

from __future__ import annotations

import json

from .reader import MAX_HELD_CHARS
from .schema_types import json_of
from .sink import Sink

STRING = frozenset(("string",))


class ValueWriter:
    """Makes JSON of one value, which comes in pieces."""

    def __init__(self, sink: Sink, types: frozenset[str], *, trims_newline: bool) -> None:
        self._sink = sink
        self._types = types
        self._trims = trims_newline
        self._pieces: list[str] = []
        self._num_chars = 0
        self._newline = ""
        """The last one, which is layout if nothing follows it."""
        self._is_first = True
        self._is_string = False

    def begin_string(self) -> None:
        """The value is a string, even where its text is a number or JSON."""
        self._is_string = True
        self._sink.arguments('"' + quoted("".join(self._pieces))[1:-1])

    @property
    def is_blank(self) -> bool:
        """Whether it is white space so far, and no string."""
        return not self._is_string and not any(map(str.strip, self._pieces))

    def push(self, text: str) -> None:
        if not (text := self._trimmed(text)):
            return
        if self._is_string:
            self._sink.arguments(quoted(text)[1:-1])
            return
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._num_chars > MAX_HELD_CHARS:
            self.begin_string()

    def _trimmed(self, text: str) -> str:
        if not text or not self._trims:
            return text
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        text, self._newline = self._newline + text, ""
        if text.endswith("\n"):
            text, self._newline = text[:-1], "\n"
        return text

    def end(self, *, is_cut_off: bool) -> None:
        if self._is_string:
            self._sink.arguments("" if is_cut_off else '"')
        elif is_cut_off:
            self._sink.arguments("".join(self._pieces))
        else:
            self._sink.arguments(json_of("".join(self._pieces), self._types))


def quoted(text: str) -> str:
    """As a JSON string."""
    return json.dumps(text, ensure_ascii=False)
