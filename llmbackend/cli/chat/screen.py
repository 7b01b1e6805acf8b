"""The screen of a chat: answers as they come, reasoning dimmed, and what an answer took.

For: the chat's loop and its commands. Does not know: servers. Invariant: what a model or a server says is printed
without its control characters.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ..harmless_text import harmless
from .conversation import Answer, Piece


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
        """The next text begins on a line of its own."""
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
    """42 tokens, 31.2 tokens/s, first token after 120 ms"""
    if answer.output_tokens is None:
        parts = [f"about {answer.num_pieces} tokens"]
    else:
        parts = [f"{answer.output_tokens} token{'' if answer.output_tokens == 1 else 's'}"]
    if answer.tokens_per_s:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    parts.append(f"first token after {answer.ttft_s * 1e3:.0f} ms")
    if answer.finish_reason == "length":
        parts.append("cut: no more tokens were allowed")
    elif answer.finish_reason not in ("stop", ""):
        parts.append(f"ended by {answer.finish_reason}")
    elif not answer.finish_reason:
        parts.append("stopped")
    return ", ".join(parts)
