"""The table of rounds and its last line.

Part of `make cluster`. Independent of how rounds are run. Invariant: the run is clean only if each stream gave its
undisturbed result, over however many connections, and nothing else went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from ..agents.validity import Validity
from ..judge import Verdict
from ..table import MAX_PROBLEMS_SHOWN
from .kills import Kill
from .pauses import Pause

NUM_PAUSES_SHOWN = 3
"""The longest ones."""


@dataclass
class ClusterRow:
    """One round. completed: streams that are as undisturbed. came_back: connections that clients came back from behind
    what they had. sent_again: requests that had to be sent again. pauses: of each kill, that of the stream that
    waited longest, ascending. limit_s: what 99 % of these may last; None = not promised."""

    name: str
    limit_s: float | None = None
    kills: list[Kill] = field(default_factory=list)
    streams: int = 0
    completed: int = 0
    came_back: int = 0
    sent_again: int = 0
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    valid: int = 0
    pauses: list[Pause] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, *, name: str) -> None:
        self.lost += verdict.lost
        self.repeated += verdict.repeated
        self.changed += verdict.changed
        self.check(verdict.is_clean, f"{name}: {verdict.reason}")

    def add_validity(self, found: Validity, *, name: str) -> None:
        self.valid += found.valid
        self.check(not found.complaint, f"{name}: {found.complaint}")

    def check(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)

    @property
    def wrong_tokens(self) -> int:
        return self.lost + self.repeated + self.changed

    @property
    def pause_p99(self) -> Pause:
        return self.pauses[round(0.99 * (len(self.pauses) - 1))]

    @property
    def pauses_shown(self) -> str:
        if not self.pauses:
            return "-"
        median_s, p99_s = self.pauses[len(self.pauses) // 2].seconds, self.pause_p99.seconds
        max_s = self.pauses[-1].seconds
        limit = "" if self.limit_s is None else f" of {self.limit_s:g}"
        return f"{median_s:.2f} / {p99_s:.2f}{limit} / {max_s:.2f}"


def print_row(row: ClusterRow, took_s: float) -> None:
    """As soon as a round is over; the table follows at the end."""
    verdict = "ok" if not row.problems else f"{len(row.problems)} PROBLEMS"
    done = f"{len(row.kills)} kills, {row.streams} streams, pauses {row.pauses_shown} s"
    print(f"{row.name}: {done}, {verdict} ({took_s:.0f} s)", flush=True)
    for pause in row.pauses[-NUM_PAUSES_SHOWN:]:
        print(f"    pause {pause}", flush=True)
    for problem in row.problems[:MAX_PROBLEMS_SHOWN]:
        print(f"    {problem}", flush=True)


def print_report(rows: Sequence[ClusterRow]) -> int:
    """Prints the table and the last line; the exit code."""
    table = Table("round")
    columns = (
        "kills",
        "streams",
        "as undisturbed",
        "came back",
        "sent again",
        "lost/repeated/changed",
        "answers valid",
    )
    for title in (*columns, "longest pause s: median / 99 % / max"):
        table.add_column(title, justify="right")
    for row in rows:
        wrong = f"{row.lost}/{row.repeated}/{row.changed}"
        cells = (len(row.kills), row.streams, row.completed, row.came_back, row.sent_again, wrong, row.valid)
        table.add_row(row.name, *map(str, cells), row.pauses_shown)
    Console(width=170).print(table)
    problems = sum(len(row.problems) for row in rows)
    lost = sum(row.wrong_tokens for row in rows)
    kills, streams = sum(len(row.kills) for row in rows), sum(row.streams for row in rows)
    print(f"cluster: {kills} kills, {streams} streams, {lost} lost{f', {problems} problems' if problems else ''}")
    return 1 if problems or lost else 0
