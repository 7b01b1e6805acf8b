"""Kinds of command-line values that several groups of flags share.

For: the groups of flags. Does not know: any flag. Invariant: a wrong value ends with a message that says what was
expected.
"""

from __future__ import annotations

from typing import Any

import typer


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
    return typer.Option(name, parser=boolean, metavar="BOOL", help=help_text)


def warn(text: str) -> None:
    """To standard error, as Triton's command line does: the log is not there yet."""
    typer.echo(f"Warning: {text}", err=True)
