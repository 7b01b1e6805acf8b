"""How flags are declared: groups of them as parameters of a command, and the kinds of values that groups share.

A group is a frozen dataclass with one field per flag, or a class that says which flags it has (`parameters`).

For: the command and the groups of flags. Does not know: any flag. Invariants: the command that typer sees has every
field of every group as a parameter of its own, in order, so that help, parsing and errors are typer's; a wrong value
ends with a message that names the flag or says what was expected.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer


def takes_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command(context, group: Group, ...)` as a function of the context and the groups' fields. A field's name must be
    unique among them."""
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
    """A dataclass may name the group in the help: PANEL."""
    if not dataclasses.is_dataclass(group):
        made: dict[str, inspect.Parameter] = group.parameters()
        return made
    hints = get_type_hints(group, include_extras=True)
    panel = getattr(group, "PANEL", None)
    for hint in hints.values():
        for option in getattr(hint, "__metadata__", ()):
            option.rich_help_panel = option.rich_help_panel or panel
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


def switch(name: str, help_text: str) -> Any:
    return typer.Option(name, parser=boolean, metavar="BOOL", help=help_text, autocompletion=one_of("true", "false"))


def one_of(*values: str) -> Callable[[str], list[str]]:
    """What a shell completes a flag's value to."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def warn(text: str) -> None:
    """To standard error, as Triton's command line does: the log is not there yet."""
    typer.echo(f"Warning: {text}", err=True)


def bad_option(flag: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=flag)
