"""Faults beside rivals: what counts as whole, lost, changed or hung, and the harness on a server of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.server_process import ROOT, write_mock_model
from trials.chaos.load import Run
from trials.chaos.outcome import Outcome
from trials.rivals.faults import FAULTS
from trials.rivals.table import markdown
from trials.rivals.trial import make_specs, way

WHOLE = Outcome("one two", finish_reason="length")


@pytest.mark.parametrize(
    ("seen", "abandoned", "expected"),
    [
        (WHOLE, False, "whole"),
        (Outcome("one", finish_reason="length"), False, "lost"),
        (Outcome("one", error="gone", code="connection"), False, "lost"),
        (Outcome("one three", finish_reason="length"), False, "changed"),
        (Outcome("one two", finish_reason="stop"), False, "changed"),
        (Outcome("one"), True, "hung"),
    ],
)
def test_a_stream_ends_in_one_way(seen: Outcome, abandoned: bool, expected: str) -> None:
    (spec,) = make_specs("model", 1, 8)
    assert way(WHOLE, Run(spec, seen, abandoned)) == expected


def test_the_table_sums_rounds_and_shows_the_slowest() -> None:
    fault = next(iter(FAULTS))
    line = {"server": "a", "fault": fault, "streams": 64, "lost": 0, "changed": 2, "hung": 0, "served_s": 1.0}
    lines = [line, line | {"lost": 3, "served_s": 2.5}, line | {"server": "b", "served_s": None}]
    assert markdown(lines).splitlines()[2] == f"| {fault} | 3 lost, 4 changed of 128; 2.5 s | 2 changed of 64; never |"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_server_loses_its_streams_and_serves_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "trials.rivals", "--only", "SIGKILL of the serving process", "--streams", "4"]
    command += ["--results", str(results), "--health", "/v2/health/live", "ours", "--"]
    write_mock_model(tmp_path / "models", mock_step_ms=15)
    serve = [sys.executable, "-m", "llmbackend.cli", "serve", "--model-repository", str(tmp_path / "models")]
    ports = ["--http-address", "127.0.0.1", "--http-port", "{port}", "--allow-grpc", "false", "--metrics-port", "0"]
    subprocess.run([*command, *serve, *ports], cwd=ROOT, check=True, timeout=100)
    (line,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert (line["lost"], line["restarts"]) == (4, 1)
    assert line["served_s"] is not None
