"""`python -m trials.rivals NAME -- COMMAND...`: injects faults under the streams of the server that COMMAND starts.

In the command, `{port}` is replaced by the port and `{folder}` by the server's folder. Results are appended to a file,
and runs already in it are not repeated; `--table` prints them. See docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.helpers.ports import free_port

from .faults import FAULTS
from .supervised import Rival, command_of, supervised
from .table import markdown
from .trial import run_trial

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def main(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the server, with its version.")] = "",
    only: Annotated[str, typer.Option(help="Faults whose name contains this.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Of every fault.")] = 1,
    streams: Annotated[int, typer.Option(min=1, help="That live when the fault comes.")] = 64,
    tokens: Annotated[int, typer.Option(min=8, help="Of each answer.")] = 192,
    port: Annotated[int, typer.Option(help="On loopback; 0 = a free one.")] = 0,
    model: Annotated[str, typer.Option(help="In requests; by default the first that the server names.")] = "",
    health: Annotated[str, typer.Option(help="The path of its liveness probe.")] = "/health",
    results: Annotated[Path, typer.Option(help="JSON lines.")] = Path("build/rivals.jsonl"),
    table: Annotated[bool, typer.Option("--table", help="Print the results, run nothing.")] = False,
) -> None:
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if table:
        print(markdown(lines))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is ended, as after Ctrl-C
    rival = Rival(name, command_of(context.args), port or free_port(), model, health)
    for round_number in range(rounds):
        for fault in FAULTS:
            key = {"server": name, "fault": fault, "round": round_number}
            if only in fault and not any(key.items() <= line.items() for line in lines):
                line = {**key, "streams": streams, "tokens": tokens, "time": time.time()}
                line |= asyncio.run(_run(rival, fault, streams, tokens))
                print(json.dumps(line), flush=True)
                results.parent.mkdir(parents=True, exist_ok=True)
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")


async def _run(rival: Rival, fault: str, streams: int, tokens: int) -> dict[str, Any]:
    """Each fault has a server of its own."""
    async with supervised(rival) as server:
        result = await run_trial(server, FAULTS[fault], streams, tokens)
    return {"one_process": True} if result is None else dataclasses.asdict(result)


if __name__ == "__main__":
    app(prog_name="python -m trials.rivals")
