"""The help of a command: its flags in sections, each flag whole on a line, at any width.

For: the commands. Does not know: any flag. Invariant: no name and no text is cut off, so that a flag can be searched
for and copied; typer's own tables cut long names at 80 columns.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PlainHelpCommand(TyperCommand):
    """For `app.command(cls=…)`. Sections are the flags' `rich_help_panel`."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given | {"rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            other = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (row := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)
