"""`python -m tools.families`: the table of docs/models.md from tests/helpers/families.py.

For: the page of model families. Invariant: tests/engine/test_families.py fails when the page is not what this writes.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.families import rows_of_docs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
_FIRST, _LAST = "| family |", "## "


def page() -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text()
    begin = text.index(_FIRST)
    end = text.index(_LAST, begin)
    return text[:begin] + "\n".join(rows_of_docs()) + "\n\n" + text[end:]


if __name__ == "__main__":
    PAGE.write_text(page())
