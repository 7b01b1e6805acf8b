"""`python -m trials.clients [--only NAME] [--model DIRECTORY] [-- ARGUMENT…]`: real clients' suites against a server.

Prints one line per client, `PACKAGE VERSION [suite]: P passed, F failed, S skipped (why)`. Exits with 1 if a test fails
that is not explained in explained.toml. Arguments after `--` are passed to pytest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from . import environment
from .explained import explanations, problems
from .served import served
from .suites import SUITES, Result, Suite, run_suite


def main(
    arguments: Annotated[list[str] | None, typer.Argument(help="For pytest.")] = None,
    only: Annotated[str, typer.Option(help="The suites whose name contains this.")] = "",
    model: Annotated[Path | None, typer.Option(help="A checkpoint to ask instead of the bundled model.")] = None,
    url: Annotated[str, typer.Option(help="A server with the models of served.py, instead of one of our own.")] = "",
) -> None:
    chosen = [suite for suite in SUITES if only.lower() in suite.name]
    if not chosen:
        raise typer.BadParameter(f"no suite has {only!r} in its name: {', '.join(suite.name for suite in SUITES)}")
    absent = _make_environments(chosen)
    runnable = [suite for suite in chosen if suite.runs_in not in absent]
    for suite in chosen:
        if suite not in runnable:
            print(f"{suite.package} [{suite.name}]: 0 passed, 0 failed, skipped ({absent[suite.runs_in]})", flush=True)
    if url:
        results = _run(runnable, url, arguments or ())
    else:
        with served(model) as server:
            results = _run(runnable, f"http://{server.http}", arguments or ())
    # Another model fails other tests, and some of the tests are some other tests.
    unexplained = problems(results) if model is None and not arguments else []
    for problem in unexplained:
        print(f"PROBLEM: {problem}")
    raise typer.Exit(1 if unexplained else 0)


def _make_environments(chosen: list[Suite]) -> dict[str, str]:
    """Why suites cannot run, by what they run in."""
    wanted = {suite.runs_in for suite in chosen}
    if "clients" in wanted:
        environment.make_python()
    if "openai3" in wanted:
        environment.make_openai3()
    made: dict[str, Callable[[], str]] = {"node": environment.make_node, "agents": environment.make_agents}
    whys = {place: make() for place, make in made.items() if place in wanted}
    return {place: why for place, why in whys.items() if why}


def _run(suites: list[Suite], url: str, arguments: list[str] | tuple[str, ...]) -> list[Result]:
    known = explanations()
    results = []
    with tempfile.TemporaryDirectory(prefix="llmbackend-clients-") as directory:
        for suite in suites:
            result = run_suite(suite, url, Path(directory), arguments)
            results.append(result)
            print(result.line, flush=True)
            for test, message in result.failures.items():
                why = known.get(suite.name, {}).get(test)
                print(f"    {test}: {why or message[:400]}", flush=True)
    return results


if __name__ == "__main__":
    typer.run(main)
