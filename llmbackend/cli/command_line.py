"""How commands declare, parse and show their flags.

A group of flags is a frozen dataclass with one field per flag, or a class that lists its flags itself (`parameters`).

Invariants: typer sees every field of every group as a parameter of the command, in order, so that help, parsing and
errors are typer's; a long name may be abbreviated if unambiguous; the help truncates nothing (typer's own tables do at
80 columns); an invalid value ends with a message that names the flag or the expectation.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Callable, MutableMapping
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand


def takes_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Turns `command(context, group: Group, ...)` into a function of the context and the groups' fields. Field names
    must be unique among the groups."""
    groups = {name: kind for name, kind in get_type_hints(command).items() if name not in ("context", "return")}

    def flat(context: typer.Context, **flags: Any) -> None:
        made = {name: kind(**{field: flags[field] for field in _fields(kind)}) for name, kind in groups.items()}
        command(context, **made)

    flat.__doc__ = command.__doc__
    flat.__name__ = command.__name__
    flat.__annotations__ = {}
    parameters = [parameter for kind in groups.values() for parameter in _fields(kind).values()]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    flat.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]  # inspect reads it
    return flat


def _fields(group: Any) -> dict[str, inspect.Parameter]:
    """A dataclass may set PANEL, the group's name in the help. A flag is named after its field; one of type bool has no
    --no- form unless it names it."""
    if not dataclasses.is_dataclass(group):
        made: dict[str, inspect.Parameter] = group.parameters()
        return made
    hints = get_type_hints(group, include_extras=True)
    panel = getattr(group, "PANEL", None)
    for name, hint in hints.items():
        for option in getattr(hint, "__metadata__", ()):
            option.rich_help_panel = option.rich_help_panel or panel
            if get_args(hint)[0] is bool and option.default is ...:  # an Annotated option's `default` is its first name
                option.param_decls = (f"--{name.replace('_', '-')}",)
    return {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def boolean(text: str | bool) -> bool:
    """Triton's flags take a value: `--allow-http=false`."""
    if isinstance(text, bool):
        return text
    values = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    try:
        return values[text.lower()]
    except KeyError:
        raise typer.BadParameter(f"invalid value for bool option: {text}") from None


def switch_of(name: str) -> str:
    """Both forms of a flag without a value, as typer expects them. name: the parameter's."""
    return "--{0}/--no-{0}".format(name.replace("_", "-"))


def switch(help_text: str) -> Any:
    return typer.Option(parser=boolean, metavar="BOOL", help=help_text, autocompletion=one_of("true", "false"))


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Completes a flag's value in a shell."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def warn(text: str) -> None:
    """Writes to standard error, as Triton does, because the log does not exist yet."""
    typer.echo(f"Warning: {text}", err=True)


def bad_option(flag: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=flag)


class PlainHelpCommand(TyperCommand):
    """A command class for `app.command(cls=…)`. The help has one section per `rich_help_panel`."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given | {"rich_markup_mode": None})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # resilient parsing is used for completion in a shell
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
    """Expands each unambiguous abbreviation of a long name on the command line, like getopt_long. Raises BadParameter
    for an ambiguous one; unknown names are left to the parser."""
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
    possible = [each for each in possible if not named[each].hidden] or possible
    if len({(id(named[each]), each in named[each].opts) for each in possible}) > 1:
        raise typer.BadParameter(f"{name} is ambiguous, expected one of {', '.join(sorted(possible))}", param_hint=name)
    return possible[0] if possible else name


def lazy_command(module: str, only_completion: bool = False) -> type[TyperCommand]:
    """A command class for `app.command(cls=…)`: the only command of the typer application `app` in `module`, a name
    relative to this package. only_completion: the declared function itself reads the arguments when called."""

    class LazyCommand(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            is_completion = parent is not None and parent.resilient_parsing
            if only_completion and not is_completion:
                return super().make_context(info_name, args, parent, **extra)
            command = typer.main.get_command(importlib.import_module(module, __package__).app)
            return command.make_context(info_name, args, parent, **extra)

    return LazyCommand


def join_equals_signs(environment: MutableMapping[str, str]) -> None:
    """Joins `--flag`, `=` and `value` in COMP_WORDS to one word, up to the word being completed."""
    words, last = environment.get("COMP_WORDS", "").split("\n"), environment.get("COMP_CWORD", "")
    if "=" not in words or not last.isdigit():
        return
    joined: list[str] = []
    for index, word in enumerate(words[: int(last) + 1]):
        is_value = index > 1 and words[index - 1] == "=" and joined[-1].endswith("=")
        if joined and (is_value or word == "="):
            joined[-1] += word
        else:
            joined.append(word)
    environment.update(COMP_WORDS="\n".join(joined), COMP_CWORD=str(len(joined) - 1))
