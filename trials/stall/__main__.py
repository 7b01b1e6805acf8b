"""`python -m trials.stall [--quick] [--mib N] [--only WORD]`: every kind of input at its maximum, and its effect on
others.

Prints one row per attack; the last line is `stall: N attacks, worst loop stall X ms, worst gap Y ms`. Exits with 1 if a
limit is exceeded, an answer is not a proper one, or a concurrent stream broke.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .attacks import ATTACKS
from .run import Felt, Pace, Undisturbed, run

QUICK_BYTES: Final = 128 << 10
_ROOM_BYTES: Final = 256 << 10
"""Of the largest body the server takes: an attack is about as large as it is told, and must not be refused for that."""


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Bodies of 128 KiB, and the limits of time are not asked for.")
    ] = False,
    mib: Annotated[float, typer.Option(help="Size of the bodies; 64 is what the server takes by default.")] = 64,
    only: Annotated[str, typer.Option(help="Attacks whose name contains this.")] = "",
    max_stall_ms: Annotated[float, typer.Option(help="Beyond it a stall of the event loop is a failure.")] = 1000,
    max_gap_ms: Annotated[float, typer.Option(help="Likewise a gap in a stream, above the undisturbed one.")] = 1000,
    undisturbed_s: Annotated[float, typer.Option(help="How long streams are measured before the attacks.")] = 5,
) -> None:
    chosen = [attack for attack in ATTACKS if only.lower() in attack.name.lower()]
    if not chosen:
        raise typer.BadParameter(f"no attack has {only!r} in its name")
    size = QUICK_BYTES if quick else int(mib * (1 << 20)) - _ROOM_BYTES
    pace = Pace(undisturbed_s=0.5, after_s=0.02, token_ms=20) if quick else Pace(undisturbed_s)
    quiet, felt = run(chosen, size_bytes=size, pace=pace, tell=_tell)
    limits = (math.inf, math.inf) if quick else (max_stall_ms, max_gap_ms)
    raise typer.Exit(_report(quiet, felt, *limits))


def _tell(felt: Felt) -> None:
    print(f"{felt.attack}: {felt.answer!r}, stall {_ms(felt.stall_s)} ms, gap {_ms(felt.gap_s)} ms", flush=True)
    for complaint in felt.complaints:
        print(f"    {complaint[:400]}", flush=True)


def _report(quiet: Undisturbed, felt: list[Felt], max_stall_ms: float, max_gap_ms: float) -> int:
    table = Table("attack", "answer")
    for title in ("answered s", "loop stall ms", "gap ms"):
        table.add_column(title, justify="right")
    for row in felt:
        table.add_row(row.attack, escape(row.answer), f"{row.took_s:.1f}", _ms(row.stall_s), _ms(row.gap_s))
    Console(width=150).print(table)
    print(f"undisturbed: slowest probe {_ms(quiet.probe_s)} ms, longest gap {_ms(quiet.gap_s)} ms")
    stall_s, gap_s = max(row.stall_s for row in felt), max(row.gap_s for row in felt)
    complaints = sum(len(row.complaints) for row in felt)
    remark = f", {complaints} complaints" if complaints else ""
    print(f"stall: {len(felt)} attacks, worst loop stall {_ms(stall_s)} ms, worst gap {_ms(gap_s)} ms{remark}")
    return 1 if complaints or 1000 * stall_s > max_stall_ms or 1000 * gap_s > max_gap_ms else 0


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


if __name__ == "__main__":
    typer.run(main)
