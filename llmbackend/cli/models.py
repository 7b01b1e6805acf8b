"""Models known by name: `llmbackend models` lists them, other commands accept the names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import typer

from ..server.known_models import KNOWN_MODELS, FetchError, known_model, models_folder
from .command_line import PlainHelpCommand

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_INTERRUPTED: Final = 130


@app.command(cls=PlainHelpCommand)
def models() -> None:
    """List the models that can be served by name."""
    with _ends_the_command():
        folder = models_folder()
    for model in KNOWN_MODELS:
        place = f"in {model.file_in(folder)}" if model.is_in(folder) else "fetched at first use"
        typer.echo(f"{model.name:12}{model.size_bytes / 1e6:5.0f} MB  {model.licence:13}{model.title}; {place}")


def go_offline() -> None:
    """From now on, this process and its engines download nothing, not even from a hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def local_model(model: str) -> str:
    """The file of a known model, fetched if missing; anything else is returned unchanged. If the file cannot be
    fetched, ends the command with exit code 1 and the reason."""
    if (known := known_model(model)) is None:
        return model
    from ..server.package_files import file_of

    with _ends_the_command():
        return str(file_of(known))


@contextlib.contextmanager
def _ends_the_command() -> Iterator[None]:
    """Ends the command with the reason if a model cannot be fetched; also on Ctrl+C, as shells expect."""
    try:
        yield
    except (FetchError, KeyboardInterrupt) as error:
        from ..server.start_failure import print_error

        print_error(str(error) or "Nothing was fetched.")
        raise typer.Exit(1 if isinstance(error, FetchError) else _INTERRUPTED) from None
