"""Text of others on the terminal: control characters, which terminals obey, are shown instead of sent.

For: every command that prints what a model or a server says. Does not know: terminals' languages. Invariant: the only
control characters that pass are newline and tab, so that a text can neither move the cursor, set the title or the
clipboard, nor turn the order of what stands beside it; each character is judged alone, so that pieces of a stream need
no memory of the last one.
"""

from __future__ import annotations

from typing import Final

_SHOWN: Final = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},  # pictures of control characters
    0x0D: None,  # beside a newline it means nothing
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "�"),  # the second set of control characters, some terminals' escape
    **{code: f"<U+{code:04X}>" for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    0x2028: "\n",
    0x2029: "\n",
    **dict.fromkeys(range(0xD800, 0xE000), "�"),  # halves of surrogate pairs, which can not be written
}


def harmless(text: str) -> str:
    """`text` as it may be written to a terminal."""
    return text.translate(_SHOWN)


def harmless_line(text: str) -> str:
    """The same on one line."""
    return " ".join(harmless(text).split())
