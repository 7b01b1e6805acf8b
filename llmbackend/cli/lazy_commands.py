"""Subcommands whose flags are in a module of their own, which is imported when the subcommand is called or completed.

For: `main.py`. Does not know: any subcommand. Invariant: the subcommand's own parser reads its arguments, shows its
help and completes them in the shell; the help and the version of `llmbackend` import none of them.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand


def lazy_command(module: str, only_completion: bool = False) -> type[TyperCommand]:
    """For `app.command(cls=…)`: the one command of the typer application `app` in `module`, a name relative to this
    package. only_completion: the declared function reads the arguments when the command is called."""

    class LazyCommand(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            is_completion = parent is not None and parent.resilient_parsing
            if only_completion and not is_completion:
                return super().make_context(info_name, args, parent, **extra)
            command = typer.main.get_command(importlib.import_module(module, __package__).app)
            return command.make_context(info_name, args, parent, **extra)

    return LazyCommand
