"""Reader: a model's output as symbols (characters and special tokens), as it arrives.

The parts of the parser are generators that yield when they need more output. Invariants: the result does not depend on
where the text was split; held text is bounded by MAX_HELD_CHARS; each symbol is read once, except that parts of
reasoning that only resemble calls are read again, so the work is linear.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of the parser that returns T."""
MAX_HELD_CHARS = 65536
"""Maximum length of a possible call that is held until it is clear whether it is one."""
SPACE = " \n\r\t"


class NotACall(Exception):  # noqa: N818 - control flow, not an error
    """The text that was read is content, not a call."""


class CallInReasoning(Exception):  # noqa: N818
    """A call begins in reasoning whose end may follow."""


class Markers:
    """Texts to find in the output, none of which contains another. Created by `markers`."""

    def __init__(self, texts: Iterable[str], only_special: Collection[str]) -> None:
        self.all = frozenset(texts)
        as_text = sorted(self.all.difference(only_special))
        self.is_empty = not as_text
        self.longest = max(map(len, as_text), default=0)
        escaped = [[re.escape(character) for character in text] for text in as_text]
        self.first = re.compile("|".join(sorted({text[0] for text in escaped})))
        self.whole = re.compile("|".join("".join(text) for text in escaped))
        self.cut_off = re.compile("(?:" + "|".join(_proper_prefixes(text) for text in escaped) + r")\Z")

    def suffixes(self, begin: str) -> list[str]:
        """The remainders of the markers that start with `begin`."""
        return [text.removeprefix(begin) for text in self.all if text.startswith(begin)]


@functools.lru_cache(maxsize=512)
def markers(texts: frozenset[str], only_special: frozenset[str] = frozenset()) -> Markers:
    """only_special: texts that are markers only as special tokens, not as ordinary characters"""
    return Markers(texts, only_special)


def _proper_prefixes(characters: list[str]) -> str:
    """A regular expression that matches all proper, non-empty prefixes of a text."""
    expression = ""
    for character in reversed(characters[1:-1]):
        expression = f"(?:{character}{expression})?"
    return characters[0] + expression if len(characters) > 1 else r"(?!)"


NO_MARKERS = Markers((), ())


class Reader:
    """Fed by its OutputParser, read by the parts of the parser."""

    def __init__(self, *, shows_special_tokens: bool) -> None:
        """shows_special_tokens: special tokens other than markers are visible text"""
        self.text = ""
        """Text of the current token."""
        self.at = 0
        """The position in it."""
        self.is_special = False
        self.has_ended = False
        self.is_cut_off = False
        """Whether the output ended at the token limit."""
        self.boundaries: frozenset[str] = frozenset()
        """Markers that end a value as special tokens, or that begin with one."""
        self.value_ends = NO_MARKERS
        """Markers that end an unfinished JSON value."""
        self._shows_special = shows_special_tokens
        self._held: list[tuple[str, bool]] | None = None
        self._num_held_chars = 0
        self._unread: deque[tuple[str, bool]] = deque()
        """Tokens after the current one that are read again."""
        self.num_unread_chars = 0
        """Of all texts that were held when `unread` was called."""

    def feed(self, text: str, is_special: bool) -> None:
        """Sets the next token; the previous one has been read."""
        self.text, self.is_special, self.at = text, is_special, 0

    # Held text.

    def hold(self, text: str = "", is_special: bool = False) -> None:
        """Keeps what is read from here on, after `text`, until `drop` or `release`."""
        self._held = [(text, is_special)] if text else []
        self._num_held_chars = len(text)

    def drop(self) -> None:
        self._held = None

    def release(self) -> str:
        """Returns the visible held text and stops holding it."""
        text = self.held_text()
        self._held = None
        return text

    def unread(self, begin: int) -> str:
        """Stops holding text. Returns the visible text before the piece `begin`; the others are read again."""
        held = self._held or []
        self._unread.extendleft(reversed([*held[begin:], (self.text[self.at :], self.is_special)]))
        self.num_unread_chars += self._num_held_chars
        self.feed("", False)
        self._held = held[:begin]
        return self.release()

    def _begin_next(self) -> bool:
        """Makes the next unread token the current one; returns False if there is none."""
        if not self._unread:
            return False
        self.feed(*self._unread.popleft())
        return True

    @property
    def num_held(self) -> int | None:
        """Number of held pieces, as a position for `held_text`; None: nothing is being held."""
        return None if self._held is None else len(self._held)

    def held_text(self, begin: int = 0) -> str:
        """The visible text of the held pieces from `begin` on."""
        held = self._held or []
        return "".join(text for text, is_special in held[begin:] if not is_special or self._shows_special)

    def consume(self, end: int) -> str:
        """Reads the current token's text up to `end`."""
        text = self.text[self.at : end]
        self.at = end
        if self._held is not None:
            self._held.append((text, self.is_special))
            self._num_held_chars += len(text)
            if self._num_held_chars > MAX_HELD_CHARS:
                raise NotACall
        return text

    # Reading.

    @property
    def is_at_end(self) -> bool:
        """Whether the output is complete and was read entirely."""
        return self.has_ended and self.at >= len(self.text) and not self._unread

    def peek(self) -> Reading[str]:
        """The next symbol, which stays unread: a character or a whole special token; "" at the end."""
        while self.at >= len(self.text):
            if self._begin_next():
                continue
            if self.has_ended:
                return ""
            yield
        return self.text if self.is_special else self.text[self.at]

    def take(self) -> str:
        """Reads the symbol that `peek` returned."""
        return self.consume(len(self.text) if self.is_special else self.at + 1)

    def skip_space(self) -> Reading[None]:
        while (symbol := (yield from self.peek())) and symbol in SPACE:
            self.take()

    def one_of(self, options: Collection[str]) -> Reading[str | None]:
        """Reads the longest of `options` that comes next, as characters or special tokens. None if none matches, in
        which case a partial match may have been read; the option "" matches if no other option begins here."""
        read, found = "", "" if "" in options else None
        while True:
            rest = [option for option in options if len(option) > len(read) and option.startswith(read)]
            symbol = (yield from self.peek()) if rest else ""
            if not symbol or not any(option.startswith(read + symbol) for option in rest):
                return found if found == read else None
            read += self.take()
            if read in options:
                found = read

    def expect(self, options: Collection[str]) -> Reading[str]:
        """`one_of` after white space. Raises NotACall if none matches."""
        yield from self.skip_space()
        found = yield from self.one_of(options)
        if found is None:
            raise NotACall
        return found

    def hold_marker(self, options: Collection[str]) -> Reading[str | None]:
        """Reads white space and one of `options`, all held. None if none matches; what was read of it is held, too."""
        self.hold()
        try:
            yield from self.skip_space()
            return (yield from self.one_of(options))
        except NotACall:
            return None

    def until(self, markers: Markers, emit: Callable[[str], None]) -> Reading[str]:
        """Emits the visible text up to the first marker, which is read and held; returns "" at the output's end. Only a
        possible start of a marker is delayed. Nothing may be held before."""
        pending = ""
        while True:
            while self.at >= len(self.text):
                if self._begin_next():
                    continue
                if self.has_ended:
                    emit(pending)
                    return ""
                yield
            if self.is_special:
                if found := (yield from self._read_marker(markers, pending, emit)):
                    return found
                emit(self.release())
                pending = ""
                continue
            text = pending + self.text[self.at :]
            self.at = len(self.text)
            if not pending and (markers.is_empty or markers.first.search(text) is None):
                emit(text)
                continue
            if match := markers.whole.search(text):
                self.at -= len(text) - match.end()
                emit(text[: match.start()])
                self.hold(match.group())
                return match.group()
            cut_off = markers.cut_off.search(text, max(0, len(text) - markers.longest + 1))
            pending = cut_off.group() if cut_off else ""
            emit(text[: len(text) - len(pending)])

    def _read_marker(self, markers: Markers, pending: str, emit: Callable[[str], None]) -> Reading[str]:
        """Reads a marker that begins with the next symbol, a special token, or with pending text, and holds it; "" for
        none."""
        begin = pending + self.text
        if not markers.suffixes(begin):
            emit(pending)
            pending, begin = "", self.text
        self.hold(pending)
        self.take()
        rest = yield from self.one_of(markers.suffixes(begin))
        return "" if rest is None else begin + rest
