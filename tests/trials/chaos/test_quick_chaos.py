"""Short chaos runs as users start them: kills, a hang, an exception and a poison request under live streams."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(300)
def test_nothing_is_lost_in_half_a_minute_of_chaos() -> None:
    command = [sys.executable, "-m", "trials.chaos", "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    last_line = run.stdout.rstrip().rpartition("\n")[2]
    assert re.fullmatch(r"chaos: 9 faults, \d+ streams, 0 lost", last_line), run.stdout + run.stderr
    assert run.returncode == 0


@pytest.mark.timeout(300)
def test_nothing_is_lost_when_frontends_and_engines_are_killed() -> None:
    command = [sys.executable, "-m", "trials.chaos", "cluster", "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    last_line = run.stdout.rstrip().rpartition("\n")[2]
    assert re.fullmatch(r"cluster: 4 kills, \d+ streams, 0 lost", last_line), run.stdout + run.stderr
    assert run.returncode == 0
