"""What the command says of a wrong command line, and how it reads abbreviated flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmbackend.demo import DEMO_REPOSITORY
from llmbackend.server.settings import ServerSettings
from tests.helpers.command_lines import CommandLine, last_line

Run = Callable[..., str]


@pytest.fixture
def refusal(command_line: CommandLine) -> Run:
    """The last line of what is said of a wrong command line."""
    return lambda *arguments: last_line(command_line.refusal(*arguments))


@pytest.fixture
def settings(command_line: CommandLine) -> Callable[..., ServerSettings]:
    return command_line.settings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nosuch"], "No such command 'nosuch'."),
        (["serve", "--nosuch"], "--nosuch"),
        (["serve", "--http-port", "many"], "--http-port"),
        (["bench"], "--model"),
        (["bench", "--model=mock"], "expected either --workload or --profile"),
        (["bench", "--model=mock", "--profile", "--workload=w"], "expected either --workload or --profile"),
        (
            ["bench", "--model=mock", "--profile", "--ablate"],
            "--ablate applies only to --workload and cannot be combined with --profile",
        ),
        (["bench", "--model=mock", "--workload=w", "--engine-args={"], "--engine-args is '{', expected a JSON object"),
        (["bench", "--model=mock", "--workload=w", '--engine-args={"nope": 1}'], "--engine-args is '{\"nope\": 1}'"),
        (
            ["bench", "--model=mock", "--workload=w", '--engine-args={"num_threads": -1}'],
            "'num_threads' is -1, expected at least 0",
        ),
        (["bench", "--model=mock", "--workload=w", '--engine-args={"dtype": "auto"}'], "expected --dtype instead"),
        (["bench", "--model=mock", "--workload=w", "--plot=/nowhere/p.svg"], "--plot is '/nowhere/p.svg', which"),
        (["bench", "--model=mock", "--workload=w", "--json=/"], "--json is '/', which is a directory"),
        (["bench", "--model=/no/such", "--workload=w"], "--model is '/no/such', which does not exist"),
        (["bench", "--model=/no/such", "--profile"], "--model is '/no/such', which does not exist"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_the_flag(refusal: Run, arguments: list[str], expected: str) -> None:
    assert expected in refusal(*arguments)


def test_help_names_each_flag_once_and_its_default(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("serve", "check"):
        assert command_line.run(command, "--help") == 0
        text = " ".join(capsys.readouterr().out.split())
        assert not re.findall(r"(--[\w-]+), \1\b", text) and "--as-json" not in text
        assert "auto: a GPU if there is one. (default: auto)" in text
        assert "(default: 64; 256 on a GPU)" in text and "(default: 512; 8192 on a GPU)" in text


def test_flags_may_be_abbreviated(settings: Callable[..., ServerSettings], tmp_path: Path) -> None:
    given = settings("--model-repo", str(tmp_path), "--log-verb=2", "--exit-on-er", "false", "--load-mod=a")
    assert given.options.model_repositories == (tmp_path,)
    assert (given.log.verbose, given.options.exit_on_error) == (2, False)
    assert given.options.startup_models == ("a",)


def test_an_exact_name_is_no_abbreviation_of_a_longer_one(settings: Callable[..., ServerSettings]) -> None:
    assert settings("--model", "mock", "--model-name", "m").flag_model == "m"


def test_a_value_is_no_flag(settings: Callable[..., ServerSettings]) -> None:
    """`--chat-template --log-verb`: the next word is the value, whatever it looks like."""
    given = settings("--model", "mock", "--id", "--log-verb")
    assert given.options.server_id == "--log-verb"


def test_names_of_one_flag_are_not_ambiguous(settings: Callable[..., ServerSettings]) -> None:
    assert settings("--model", "mock", "--served-model-n", "m").flag_model == "m"


def test_an_ambiguous_name_is_refused_with_those_that_it_may_mean(refusal: Run) -> None:
    line = refusal("serve", "--http-")
    assert line.startswith("--http- is ambiguous, expected one of ") and "--http-port" in line


def test_without_a_model_the_demo_model_is_served(settings: Callable[..., ServerSettings], tmp_path: Path) -> None:
    assert settings().options.model_repositories == (DEMO_REPOSITORY,)
    assert settings("--model-repository", str(tmp_path)).options.model_repositories == (tmp_path,)
    [own] = settings("--model", "mock").options.model_repositories
    assert json.loads((own / "mock" / "1" / "model.json").read_text())["model"] == "mock"
