"""The golden transcripts replayed against this host: every difference must be listed in by_design.toml."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from tests.conformance.replayer.by_design import read_rules
from tests.conformance.replayer.compare import compare
from tests.conformance.replayer.normalise import normalise
from tests.conformance.replayer.report import print_report
from tests.conformance.replayer.run import GOLDEN, GROUPS, RULES, replay_all
from tests.conformance.replayer.transcript import Command, read_transcript

LIVE_RULES = Path(__file__).parents[2] / "trials" / "live" / "by_design.toml"
RELEASES = {"26.09", "main", "own"}
"""Whose behaviour takes the place of release 24.10's; docs/conformance.md explains them."""


def test_reading_a_transcript_loses_no_character_of_an_answer() -> None:
    paths = sorted(GOLDEN.glob("*.txt"))
    assert len(paths) == 35
    for path in paths:
        text = path.read_text()
        for command in read_transcript(path).commands:
            head = f"$ {command.text}\n" + (f"{command.script}PY\n" if command.script is not None else "")
            assert head + command.answer in text


def test_only_header_order_and_case_and_counters_are_normalised_away() -> None:
    ours = 'HTTP/1.1 200 OK\ndate: today\ncontent-type: text/plain\ncontent-length: 9\n\n{"ns":12}'
    golden = 'HTTP/1.1 200 OK\nContent-Length: 8\nContent-Type: text/plain\n\n{"ns":5}'
    assert normalise(ours) == normalise(golden)
    assert normalise(ours) != normalise(golden.replace("200 OK", "400 Bad Request"))
    assert normalise(ours) != normalise(golden.replace("text/plain", "application/json"))


def test_a_rule_pins_our_answer_and_hides_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        '[[difference]]\nname = "n"\nreason = "r"\nrelease = "own"\ntranscripts = ["01"]\n'
        'change = [{ golden = "a", ours = "b" }]\n'
    )
    rules = read_rules(path)
    command = Command("curl", "a c\n", 1)
    assert compare("01", command, "b c\n", rules).rules
    assert compare("01", command, "x c\n", rules).diff
    assert compare("01", command, "b d\n", rules).diff
    assert compare("02", command, "b c\n", rules).diff


@pytest.mark.parametrize(
    ("path", "heading"), [(RULES, "## Differences by design"), (LIVE_RULES, "## Comparison with a running Triton")]
)
def test_every_difference_by_design_is_explained_with_its_release(path: Path, heading: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    table = page.partition(heading)[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    differences = {rule["name"]: rule["release"] for rule in tomllib.loads(path.read_text())["difference"]}
    assert differences and set(differences.values()) <= RELEASES
    for name, release in differences.items():
        row = next((releases for names, releases in rows if f"`{name.removesuffix('-counted')}`" in names), None)
        assert row is not None and release in row.strip().split(", "), f"{name}: {release}, not {row}"


TOOLS = ("bash", "curl", "jq", "gzip")
"""What the recorded commands call."""


@pytest.fixture(scope="module")
def tools() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"the recorded commands need {', '.join(missing)}, not installed here")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("groups", [1, len(GROUPS)], ids=["most transcripts", "all transcripts"])
def test_no_answer_differs_but_by_design(groups: int, capsys: pytest.CaptureFixture[str]) -> None:
    """groups: how many of the recorded servers; the first one has four fifths of the transcripts."""
    numbers = [number for group in GROUPS[:groups] for number in group.numbers]
    partial = groups < len(GROUPS)
    code = print_report(replay_all(numbers if partial else ()), partial)
    assert code == 0, capsys.readouterr().out
