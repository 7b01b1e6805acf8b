"""`make kills`: what was seen adds up over runs, and its passes differ."""

from __future__ import annotations

from pathlib import Path

from trials.chaos.kills import Seen, act, read, write
from trials.chaos.table import Row


def test_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kills.json"
    for _ in range(2):
        seen = read(path)
        seen.add(
            [Row("kill", 40, 100, recoveries_s=[0.5, 0.1]), Row("cut", 2, 9, lost=1, problems=["one", "two"])], 60.0
        )
        write(path, seen)
    seen = read(path)
    assert (seen.kills, seen.streams, seen.lost, seen.slowest_recovery_s) == (84, 218, 2, 0.5) and seen.seconds == 120.0
    assert seen.kills_by_round == {"kill": 80, "cut": 4}
    assert seen.problems == ["pass 1, cut: one", "pass 2, cut: one"]
    assert str(seen) == "kills: 84 kills, 218 streams, 2 lost, 2 problems"


def test_no_two_passes_ask_for_the_same() -> None:
    passes = [act(number) for number in (0, 5)]
    first, second = ({spec.prompt for spec in one.specs} for one in passes)
    assert [one.rounds[0].name for one in passes] == ["SIGKILL mock"] * 2
    assert first != second
    assert read(Path("nowhere")) == Seen()
