"""Why a GGUF file cannot be served."""

from __future__ import annotations


class GgufError(ValueError):
    """One line that names the file's field or tensor, its value and what was expected."""


def short(text: str) -> str:
    """Shortens a string from a file for a message."""
    shown = ascii(text[:121])[1:-1] if not text.isprintable() else text[:121]
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
