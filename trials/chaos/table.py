"""The table of rounds and its last line.

Part of `make chaos`. Independent of how rounds are run. Invariant: the run is clean only if every stream of every row
completed or ended as its round intends, with no token lost, repeated or changed, and no other problem.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from .agents.validity import Validity
from .judge import Verdict

MAX_PROBLEMS_SHOWN = 8


@dataclass
class Row:
    """One round. otherwise: streams that ended in another way than completing, as the round means it (`how`). valid,
    truncated: choices of agents' answers that are what was asked for, and those cut off at their length."""

    fault: str
    injected: int = 0
    streams: int = 0
    completed: int = 0
    otherwise: int = 0
    how: str = ""
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    valid: int = 0
    truncated: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, *, name: str) -> None:
        self.lost += verdict.lost
        self.repeated += verdict.repeated
        self.changed += verdict.changed
        if not verdict.is_clean:
            self.problems.append(f"{name}: {verdict.reason}")

    def add_validity(self, found: Validity, *, name: str) -> None:
        self.valid += found.valid
        self.truncated += found.truncated
        self.check(not found.complaint, f"{name}: {found.complaint}")

    def check(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)

    @property
    def recovery(self) -> str:
        if not self.recoveries_s:
            return "-"
        return f"{statistics.median(self.recoveries_s):.2f} (max {max(self.recoveries_s):.2f})"


def print_row(row: Row, took_s: float) -> None:
    """As soon as a round is over; the table follows at the end."""
    verdict = "ok" if not row.problems else f"{len(row.problems)} PROBLEMS"
    answers = f", {row.valid} answers valid, {row.truncated} cut off" if row.valid or row.truncated else ""
    print(f"{row.fault}: {row.injected} faults, {row.streams} streams{answers}, {verdict} ({took_s:.0f} s)", flush=True)
    for problem in row.problems[:MAX_PROBLEMS_SHOWN]:
        print(f"    {problem}", flush=True)


def print_report(rows: Sequence[Row]) -> int:
    """Prints the table and the last line; the exit code."""
    table = Table("fault")
    for title in ("injected", "streams", "completed", "ended as meant", "lost/repeated/changed tokens", "recovery s"):
        table.add_column(title, justify="right")
    for row in rows:
        tokens = f"{row.lost}/{row.repeated}/{row.changed}"
        otherwise = f"{row.otherwise} {row.how}" if row.otherwise else "-"
        cells = (row.injected, row.streams, row.completed, otherwise, tokens, row.recovery)
        table.add_row(row.fault, *map(str, cells))
    Console(width=140).print(table)
    problems = sum(len(row.problems) for row in rows)
    lost = sum(row.lost + row.repeated + row.changed for row in rows)
    faults, streams = sum(row.injected for row in rows), sum(row.streams for row in rows)
    remark = f", {problems} problems" if problems else ""
    print(f"chaos: {faults} faults, {streams} streams, {lost} lost{remark}")
    return 1 if problems or lost else 0
