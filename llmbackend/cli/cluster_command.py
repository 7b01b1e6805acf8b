"""`llmbackend cluster init`: the secrets of a new cluster, to be copied to its machines.

For: people who set up several machines (docs/cluster.md). Does not know: what the secrets are. Invariant: an existing
cluster's secrets are never replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .help_text import PlainHelpCommand

app = typer.Typer(help="Several machines as one server.", no_args_is_help=True, add_completion=False)


@app.callback()
def cluster() -> None:
    """Several machines as one server."""


@app.command(cls=PlainHelpCommand)
def init(
    folder: Annotated[
        Path | None, typer.Argument(help="Default: the one of --cluster-secrets.", show_default=False)
    ] = None,
) -> None:
    """Make the secrets of a new cluster."""
    from llmbackend.cluster.settings import ClusterError

    from ..cluster.ray_node import require_ray
    from ..cluster.secrets_folder import SecretsFolder
    from ..cluster.settings import DEFAULT_SECRETS

    try:
        require_ray()
        made = SecretsFolder.create(folder or DEFAULT_SECRETS)
    except ClusterError as error:
        typer.echo(f"cluster init: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"made in {made.path}: copy this folder to each machine of the cluster, over a channel you trust")
