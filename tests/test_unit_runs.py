"""`make unit`: a test that passes only the second time is counted, printed, and not forgiven twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[1]
FLAKY = """
from pathlib import Path

def test_steady():
    pass

def test_flaky():
    mark = Path("failed_once")
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time")
"""
PLUGINS = ("schemathesis", "hypothesispytest", "anyio", "asyncio", "typeguard")
"""Not needed here, and slow to start."""
NAME = "test_some.py::test_flaky"


def unit(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tools.unit", "-n0", *(part for name in PLUGINS for part in ("-p", f"no:{name}"))]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_flaky_test_is_printed_and_fails_the_suite_the_second_time(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FLAKY)
    first, steady = unit(tmp_path), unit(tmp_path)
    assert first.returncode == 0, first.stdout
    assert f"1 flaky: failed in the suite, passed alone (mend them):\n  {NAME}" in first.stdout
    assert steady.returncode == 0 and "flaky:" not in steady.stdout
    (tmp_path / "failed_once").unlink()
    second = unit(tmp_path)
    assert second.returncode == 1
    assert f"flaky for the second time in the last 20 runs (.cache/flaky_tests.json):\n  {NAME}" in second.stdout
    assert json.loads((tmp_path / ".cache" / "flaky_tests.json").read_text()) == [[NAME], [], [NAME]]


def test_what_fails_twice_in_a_run_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_broken():\n    assert 0\n")
    broken = unit(tmp_path)
    assert broken.returncode == 1 and "flaky" not in broken.stdout
    assert not (tmp_path / ".cache").exists()
