"""`llmbackend check`: its flags, what it looks at, and its exit code.

For: people before `serve`, and scripts. Does not know: how a model is judged, or shown. Invariants: exit code 0 = every
model would load, 1 = one would not, or there is none; no engine is started and no weights are read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmbackend.core.config.model_config import CONFIG_FILE_NAME
from llmbackend.core.server_options import ServerOptions

from ...server.serve import reasons_with_flags
from ..command_line import PlainHelpCommand, bad_option, takes_flag_groups
from ..flags.engine import EngineFlags
from .dry_load import Finding, check_model

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class CheckFlags:
    """What is checked, and how it is told."""

    target: Annotated[
        str, typer.Argument(help="Checkpoint (directory or hub id), model of a Triton repository, or repository.")
    ]
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per model, on standard output.")] = False
    backend_directory: Annotated[Path | None, typer.Option(help="As for serve.")] = None
    model_config_name: Annotated[str, typer.Option(help="As for serve.")] = ""


@app.command(cls=PlainHelpCommand)
@takes_flag_groups
def check(context: typer.Context, flags: CheckFlags, engine: EngineFlags) -> None:
    """Check whether a model loads, how it is computed, and how much memory it takes. Reads no weights."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    repository, names, flag_model = _models(flags.target, engine)
    options = ServerOptions(
        backend_directory=flags.backend_directory, model_config_name=flags.model_config_name, repository_poll_secs=0
    )
    findings = [finding for name in names for finding in check_model(name, repository, options)]
    _print(findings, flag_model, flags.as_json)
    if any(finding.reasons for finding in findings):
        raise typer.Exit(1)


def _models(target: str, engine: EngineFlags) -> tuple[Path, list[str], str]:
    """Repository, models in it, and the name of the model of engine flags. Raises BadParameter."""
    path = Path(target)
    if not path.is_dir() or (path / "config.json").is_file():
        try:
            single = engine.model(target)
        except typer.BadParameter as error:
            raise _about_target(error) from None
        assert single is not None
        return single.make_repository(), [single.name], single.name
    engine.model("")  # refuses engine flags
    path = path.resolve()
    if _is_model(path):
        return path.parent, [path.name], ""
    names = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_model(child))
    if not names:
        expected = "a checkpoint (config.json), a model of a repository (config.pbtxt, 1/), or a repository of such"
        raise bad_option("TARGET", f"'{target}' holds no model, expected {expected}")
    return path, names, ""


def _about_target(error: typer.BadParameter) -> typer.BadParameter:
    """An error about `--model`, which this command does not have."""
    if error.param_hint != "--model":
        return error
    return bad_option("target", error.message.replace("--model is", "the target is", 1))


def _is_model(path: Path) -> bool:
    if (path / CONFIG_FILE_NAME).is_file() or (path / "configs").is_dir():
        return True
    return any(child.is_dir() and child.name.isascii() and child.name.isdigit() for child in path.iterdir())


def _print(findings: list[Finding], flag_model: str, as_json: bool) -> None:
    from .report import as_object, print_finding

    for finding in findings:
        reasons = reasons_with_flags(finding.reasons, flag_model)
        if as_json:
            typer.echo(json.dumps(as_object(finding, reasons)))
        else:
            print_finding(finding, reasons)
