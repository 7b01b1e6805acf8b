"""How commands read and show their flags: names may be abbreviated; the help has sections, each flag on one line.

For: the commands. Does not know: any flag. Invariants: an abbreviation is accepted only if it is unambiguous; the help
truncates no name and no text, so that flags can be searched for and copied (typer's own tables truncate long names at
80 columns).
"""

from __future__ import annotations

import itertools
from typing import Any

import typer
from typer.core import TyperCommand


class PlainHelpCommand(TyperCommand):
    """For `app.command(cls=…)`. Sections are the flags' `rich_help_panel`."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given | {"rich_markup_mode": None})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # as a shell completes it
            args = _with_whole_names(args, self.get_params(ctx))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            other = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (row := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _with_whole_names(args: list[str], parameters: list[Any]) -> list[str]:
    """The command line with each unambiguous abbreviation of a long name expanded, as getopt_long does. Raises
    BadParameter for an ambiguous one; unknown names are left to the parser."""
    named = {name: each for each in parameters for name in (*each.opts, *each.secondary_opts) if name[:2] == "--"}
    whole: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            return [*whole, arg, *rest]
        name, equals, value = arg.partition("=")
        name = _whole_name(name, named) if name.startswith("--") else name
        whole.append(f"{name}{equals}{value}")
        if name in named and not equals and not named[name].is_flag:
            whole += itertools.islice(rest, 1)  # its value
    return whole


def _whole_name(name: str, named: dict[str, Any]) -> str:
    if name in named:
        return name
    possible = [each for each in named if each.startswith(name)]
    if len({(id(named[each]), each in named[each].opts) for each in possible}) > 1:
        raise typer.BadParameter(f"{name} is ambiguous, expected one of {', '.join(sorted(possible))}", param_hint=name)
    return possible[0] if possible else name
