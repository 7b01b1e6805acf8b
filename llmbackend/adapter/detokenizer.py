"""Tokens to text, one token at a time.

For: streams. Does not know: stop strings, requests. Invariant: a piece never ends inside a character, and the pieces of
a sequence put together are its decoded text, whatever the pieces were. Cost per token does not grow with the sequence.
Stream and non-stream use this same path, so they cannot differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_UTF8_BYTES = 4


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that is complete with this token, possibly ""."""

    def flush(self) -> str:
        """The rest at the end of the sequence; an unfinished character becomes U+FFFD."""


class NullDetokenizer:
    """For generations that nobody reads."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings (byte-level BPE, bytes): exact for every sequence, also invalid
    UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder (byte fallback, WordPiece …), whose text depends on the neighbours: decodes a small
    window.

    The window is a context of tokens already shown and the tokens not shown yet; the new text is what the latter add.
    It starts with the end of the prompt, so that a space before the first word survives. Tokens in `skip` add no text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = (), skip: frozenset[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._skip = skip
        self._window = [token_id for token_id in context if token_id not in skip]
        self._context_text = decode(self._window) if self._window else ""
        if self._context_text.endswith(REPLACEMENT):
            self._window, self._context_text = [], ""
        self._context_length = len(self._window)
        self._incomplete = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            # The start of a character, or a broken one: the fourth byte tells.
            self._incomplete += 1
            if self._incomplete < MAX_UTF8_BYTES:
                return ""
        return self._show(text)

    def flush(self) -> str:
        if len(self._window) == self._context_length:
            return ""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._incomplete = 0
        if new:
            self._window = self._window[self._context_length :]
            self._context_length = len(self._window)
            self._context_text = self._decode(self._window)
        return new
