"""docs/tool_calling.md names every format, and says truly where strict functions can be enforced."""

from __future__ import annotations

import re
from pathlib import Path

from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS

PAGE = Path("docs/tool_calling.md").read_text()


def rows(heading: str) -> list[list[str]]:
    section = PAGE.partition(f"### {heading}\n")[2].partition("\n#")[0]
    lines = [re.sub(r"\\\|", "", line) for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_lists_the_formats_of_tool_calls() -> None:
    listed = {row[0].strip("`"): row[-1] for row in rows("Tool calls")}
    assert listed == {name: "no" if table.only_required else "yes" for name, table in TOOL_CALL_FORMATS.items()}


def test_calls_of_every_format_can_be_required() -> None:
    assert all(table.grammar for table in TOOL_CALL_FORMATS.values())


def test_the_page_lists_the_formats_of_reasoning() -> None:
    listed = [name for row in rows("Reasoning") for name in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(listed) == sorted(REASONING_FORMATS)
