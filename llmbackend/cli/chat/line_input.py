"""What a person types: questions of one or several lines, with the editing keys of the shell.

For: the chat's loop. Does not know: what is typed. Invariant: nothing that is typed is written to a file.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

PROMPT = ">>> "
_CONTINUED = "... "
_QUOTES = '"""'


def prepare(commands: Iterable[str]) -> None:
    """Editing, a history of this session, Tab for commands, Alt+Enter for a new line. Without readline, none of it."""
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
    """What was typed, without the marks of several lines. Raises EOFError and KeyboardInterrupt."""
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
    """One of several models, by its number or its name. Raises EOFError and KeyboardInterrupt."""
    while True:
        text = input(f"Model (1 to {len(names)}, or its name): ").strip()
        if text in names:
            return text
        if text.isascii() and text.isdigit() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        print(f"'{text}' is none of them.", file=sys.stderr)
