"""Docstrings for the site: turns lines with two columns, `name  meaning`, into lists.

Used by mkdocstrings, which loads this file as an extension of griffe.
"""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # where no site is built
    Extension = object

_COLUMNS = re.compile(r"(?P<names>\w+(?:, \w+)*) {2,}(?P<meaning>\S.*)")
_ONE = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<meaning>\S.*)")


def with_lists(text: str) -> str:
    """Lines that continue an entry are indented in the source; they stay with it."""
    lines: list[str] = []
    is_in_list = False
    for line in text.splitlines():
        entry = _COLUMNS.fullmatch(line) or _ONE.fullmatch(line)
        if entry:
            lines += [""] if lines and lines[-1] and not is_in_list else []
            lines.append(f"- `{entry['names']}`: {entry['meaning']}")
        elif is_in_list and line.startswith("  "):
            lines.append(f"  {line.strip()}")
            continue
        else:
            lines += ([""] if is_in_list and line else []) + [line]
        is_in_list = entry is not None
    return "\n".join(lines)


class Columns(Extension):  # type: ignore[misc]
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
