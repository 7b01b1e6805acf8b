"""Commands whose parameters are groups of flags: frozen dataclasses, one field per flag, or classes that say which
flags they have (`parameters`).

For: the command line. Does not know: any flag. Invariant: the command that typer sees has every field of every group
as a parameter of its own, in order, so that help, parsing and errors are typer's.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def takes_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command(group: Group, ...)` as a function of the groups' fields. A field's name must be unique among them."""
    groups = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}

    def flat(**flags: Any) -> None:
        command(**{name: kind(**{field: flags[field] for field in _fields(kind)}) for name, kind in groups.items()})

    flat.__doc__ = command.__doc__
    flat.__name__ = command.__name__
    flat.__annotations__ = {}
    parameters = [parameter for kind in groups.values() for parameter in _fields(kind).values()]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
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
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    }
