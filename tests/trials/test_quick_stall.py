"""`make stall` with small bodies: every attack gets a proper answer, and the streams beside it live."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trials.stall.attacks import ATTACKS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_every_attack_is_answered_and_the_streams_beside_it_live() -> None:
    command = [sys.executable, "-m", "trials.stall", "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    last_line = run.stdout.rstrip().rpartition("\n")[2]
    expected = rf"stall: {len(ATTACKS)} attacks, worst loop stall \d+ ms, worst gap \d+ ms"
    assert re.fullmatch(expected, last_line), run.stdout + run.stderr
    assert run.returncode == 0
