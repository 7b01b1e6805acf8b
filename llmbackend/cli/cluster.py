"""Several machines as one server: the flags of `llmbackend serve`, and `llmbackend cluster init`.

Independent of how the flags are used and of what the secrets are. Invariants: an invalid value ends with a message that
names its flag; an existing cluster's secrets are never replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ..cluster.settings import (
    DEFAULT_PORT,
    DEFAULT_SECRETS,
    LOOPBACK,
    ClusterError,
    ClusterSettings,
    default_run_folder,
)
from .command_line import PlainHelpCommand, bad_option


@dataclass(frozen=True)
class ClusterFlags:
    PANEL: ClassVar = "Several machines"

    cluster: Annotated[
        str | None,
        typer.Option(help="'auto': start a cluster, or use this machine's Ray node; HOST:PORT: join a cluster."),
    ] = None
    cluster_bind: Annotated[
        str, typer.Option(help="This machine's address for the others. The default is a cluster of one machine.")
    ] = LOOPBACK
    cluster_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of Ray on the first machine; 0 = any.")] = (
        DEFAULT_PORT
    )
    cluster_secrets: Annotated[
        Path, typer.Option(help="Folder of the cluster's secrets, the same on all machines.")
    ] = DEFAULT_SECRETS
    cluster_cpus: Annotated[int | None, typer.Option(min=0, help="CPUs of this machine for engines. Default: all.")] = (
        None
    )
    cluster_gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of this machine for engines. Default: all.")] = (
        None
    )
    cluster_run_folder: Annotated[
        Path | None, typer.Option(help="Folder for Ray's files; its path must be short. Default: one per user.")
    ] = None

    def settings(self) -> ClusterSettings | None:
        """None = no cluster."""
        if self.cluster is None:
            return None
        try:
            return ClusterSettings(
                address=self.cluster,
                bind=self.cluster_bind,
                port=self.cluster_port,
                secrets=self.cluster_secrets,
                num_cpus=self.cluster_cpus,
                num_gpus=self.cluster_gpus,
                run_folder=self.cluster_run_folder or default_run_folder(),
            )
        except ValueError as error:
            raise bad_option("--cluster", str(error)) from None


app = typer.Typer(help="Several machines as one server.", no_args_is_help=True, add_completion=False)


@app.callback()
def cluster() -> None:
    """Several machines as one server."""


@app.command(cls=PlainHelpCommand)
def init(
    folder: Annotated[
        Path | None, typer.Argument(help="Default: as for --cluster-secrets.", show_default=False)
    ] = None,
) -> None:
    """Make the secrets of a new cluster."""
    from ..cluster.ray_node import require_ray
    from ..cluster.secrets_folder import SecretsFolder

    try:
        require_ray()
        made = SecretsFolder.create(folder or DEFAULT_SECRETS)
    except ClusterError as error:
        typer.echo(f"cluster init: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"created {made.path}: copy this folder to each machine of the cluster over a channel you trust")
