"""The terminal of a chat: typed questions, answers as they arrive with dimmed reasoning, and their figures.

Independent of servers. Invariants: text from models and servers is printed without control characters; typed text is
never written to a file.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from ..terminal_text import harmless
from .conversation import Answer, Piece

PROMPT = ">>> "
_CONTINUED = "... "
_QUOTES = '"""'


def prepare(commands: Iterable[str]) -> None:
    """Enables editing, the session's history, Tab for commands, and Alt+Enter for a new line, with readline."""
    with contextlib.suppress(ImportError):
        import readline

        found: list[str] = []

        def complete(text: str, state: int) -> str | None:
            if state == 0:
                found[:] = [f"{name} " for name in commands if text and name.startswith(text)]
            return found[state] if state < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" ")
        for binding in ("tab: complete", "set enable-bracketed-paste on", r'"\e\C-m": "\C-v\C-j"'):
            readline.parse_and_bind(binding)


def read_question() -> str:
    """The typed text, without the marks for multiple lines. Raises EOFError and KeyboardInterrupt."""
    line = input(PROMPT)
    if line.lstrip().startswith(_QUOTES):
        return _quoted(line.lstrip()[len(_QUOTES) :])
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = input(_CONTINUED)
    return "\n".join([*lines, line]).strip()


def _quoted(line: str) -> str:
    lines = []
    while _QUOTES not in line:
        lines.append(line)
        line = input(_CONTINUED)
    lines.append(line[: line.index(_QUOTES)])
    return "\n".join(lines).strip("\n")


def read_choice(names: list[str]) -> str:
    """One of several models, chosen by number or name. Raises EOFError and KeyboardInterrupt."""
    while True:
        text = input(f"Model (1 to {len(names)}, or its name): ").strip()
        if text in names:
            return text
        if text.isascii() and text.isdigit() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        print(f"'{text}' is none of them.", file=sys.stderr)


class Screen:
    def __init__(self, console: Console) -> None:
        self.console = console
        self._is_reasoning = False
        self._ends_with_newline = True

    def piece(self, piece: Piece) -> None:
        text = harmless(piece.text)
        if self._is_reasoning and not piece.is_reasoning:
            self.end_of_line()
            self.console.print()
            text = text.lstrip("\n")
        self._is_reasoning = piece.is_reasoning
        self._write(text, "dim" if piece.is_reasoning else "")

    def end_of_line(self) -> None:
        """Makes the next text start on a new line."""
        self._is_reasoning = False
        if not self._ends_with_newline:
            self.console.print()
            self._ends_with_newline = True

    def note(self, text: str) -> None:
        self.console.print(Text(harmless(text), "dim"), soft_wrap=True)

    def error(self, text: str) -> None:
        self.console.print(Text(harmless(text), "bold red"), soft_wrap=True)

    def _write(self, text: str, style: str) -> None:
        if text:
            self.console.print(Text(text, style), end="", soft_wrap=True)
            self._ends_with_newline = text.endswith("\n")


def summary(answer: Answer) -> str:
    """For example: 42 tokens, 31.2 tokens/s, first token after 120 ms"""
    if answer.output_tokens is None:
        parts = [f"about {answer.num_pieces} tokens"]
    else:
        parts = [f"{answer.output_tokens} token{'' if answer.output_tokens == 1 else 's'}"]
    if answer.tokens_per_s:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    parts.append(f"first token after {answer.ttft_s * 1e3:.0f} ms")
    if answer.finish_reason == "length":
        parts.append("cut off at the token limit")
    elif answer.finish_reason not in ("stop", ""):
        parts.append(f"ended by {answer.finish_reason}")
    elif not answer.finish_reason:
        parts.append("stopped")
    return ", ".join(parts)
