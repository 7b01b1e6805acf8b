"""`python -m trials.chaos [chaos|cluster|kills|soak|overload|idle]`: injects faults and reports what clients saw.

chaos (the default) prints a table and `chaos: N faults, N streams, 0 lost`; with --quick it takes half a minute. Every
command exits with 1 if anything is wrong.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="A few faults on the mock model, half a minute.")] = False,
    only: Annotated[str, typer.Option(help="Rounds whose name contains this; with the chaos command alone.")] = "",
) -> None:
    if context.invoked_subcommand is None:
        _chaos(quick, only)


@app.command()
def chaos(
    quick: Annotated[bool, typer.Option("--quick", help="A few faults on the mock model, half a minute.")] = False,
    only: Annotated[str, typer.Option(help="Rounds whose name contains this.")] = "",
) -> None:
    """Faults of every kind under live streams."""
    _chaos(quick, only)


def _chaos(quick: bool, only: str) -> None:
    from .chaos import run_chaos

    raise typer.Exit(asyncio.run(run_chaos(quick=quick, only=only)))


@app.command()
def cluster(
    only: Annotated[str, typer.Option(help="Rounds whose name contains this.")] = "",
    kills: Annotated[int, typer.Option(min=0, help="In all; 0 = as many as the rounds say.")] = 0,
    seed: Annotated[int, typer.Option(help="Of requests and kills.")] = 1,
    demo: Annotated[bool, typer.Option("--demo/--mock", help="The bundled model in place of the mock one.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few kills on one machine.")] = False,
) -> None:
    """Frontends, hosts and engines are killed and cut off from each other."""
    from .cluster.run import Choice, run_cluster

    raise typer.Exit(asyncio.run(run_cluster(Choice(only, kills, seed, demo, quick))))


@app.command()
def kills(
    target: Annotated[int, typer.Option(min=1, help="Kills in all, those of earlier runs included.")] = 10_000,
    state: Annotated[Path, typer.Option(help="What has been seen so far.")] = Path("build/kills.json"),
    minutes: Annotated[float, typer.Option(min=0, help="No pass begins later; the next run goes on.")] = 1e6,
) -> None:
    """Engines are killed under every kind of stream, thousands of times."""
    from .kills import run_kills

    raise typer.Exit(asyncio.run(run_kills(target, state, minutes)))


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=3, help="How long, warm-up included.")] = 20,
    seed: Annotated[int, typer.Option(help="Of requests and faults.")] = 1,
) -> None:
    """Saturation with random cancels and kills: everything ends where it began."""
    from .soak import run_soak

    raise typer.Exit(asyncio.run(run_soak(minutes * 60, seed)))


@app.command()
def overload(
    seconds: Annotated[float, typer.Option(min=5, help="How long the overload lasts.")] = 60,
) -> None:
    """Ten times the capacity offered."""
    from .overload import run_overload

    raise typer.Exit(asyncio.run(run_overload(seconds)))


@app.command()
def idle(
    seconds: Annotated[float, typer.Option(min=5, help="How long to watch.")] = 60,
) -> None:
    """CPU use of a whole idle server."""
    from .idle import run_idle

    raise typer.Exit(asyncio.run(run_idle(seconds)))


if __name__ == "__main__":
    app(prog_name="python -m trials.chaos")
