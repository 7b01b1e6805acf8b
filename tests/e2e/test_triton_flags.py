"""Triton's command line: every flag is known, with its default; what means nothing here says so."""

from __future__ import annotations

import functools
import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.main import get_command

from llmbackend.cli.flags.clients import LimitFlags
from llmbackend.cli.flags.inert import TRITON
from llmbackend.cli.serve import app
from tests.helpers.command_lines import CommandLine
from tests.helpers.server_process import ROOT, ServerProcess, post, start_server, stop_server
from tests.helpers.waiting import eventually

MakeServer = Callable[..., ServerProcess]
Refusal = Callable[..., str]
INDEX = "/v2/repository/index"
PAGE = ROOT / "docs" / "command_line.md"
NONE = "-"

BACKEND = """
from llmbackend.core.backend_api import ResponseFlag

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
"""


@dataclass(frozen=True)
class Flag:
    """A flag of Triton: its default and a value to try, NONE where it has none."""

    name: str
    default: str
    value: str


def triton_flags() -> list[Flag]:
    lines = (Path(__file__).parent / "triton_flags.txt").read_text().splitlines()
    return [Flag(*line.split()) for line in lines if line and not line.startswith("#")]


FLAGS = triton_flags()
DIFFERENT_DEFAULTS = {
    "response-cache-byte-size": "0",
    "allow-client-shm": NONE,
    "log-verbose": "0",
    "backend-directory": NONE,
    "repoagent-directory": NONE,
    "cache-directory": NONE,
    "trace-rate": NONE,
    "trace-count": NONE,
    "trace-log-frequency": NONE,
    "grpc-max-connection-age": "0",
    "grpc-max-connection-age-grace": "0",
}
"""Another spelling of the same (a deprecated flag that was not given says nothing), or a directory of Triton's
container that means nothing outside of it."""


TAKEN_ALONE = ("model-store", "strict-model-config", "response-cache-byte-size")
"""Another flag says the same; Triton, too, refuses --cache-config together with --response-cache-byte-size."""


@functools.cache
def options() -> dict[str, Any]:
    """The options of `llmbackend serve` by name, without dashes."""
    command: Any = get_command(app)
    return {name.removeprefix("--"): option for option in command.params for name in option.opts}


def write_repository(folder: Path) -> Path:
    """`folder`/models with the model `echo`."""
    directory = folder / "models" / "echo"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text('backend: "echo"\n')
    (directory / "backend.py").write_text(BACKEND)
    return directory.parent


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for other in ("backends", "agents"):
        (tmp_path / other).mkdir()
    return write_repository(tmp_path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`llmbackend serve` with a command line that it refuses."""
    command = [sys.executable, "-m", "llmbackend.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def refusal(command_line: CommandLine) -> Refusal:
    return command_line.refusal_of_flags


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_of_triton_is_known_with_its_default(flag: Flag) -> None:
    option = options().get(flag.name)
    assert option is not None, f"--{flag.name} is not known"
    if flag.name.replace("-", "_") in TRITON:
        return
    expected = DIFFERENT_DEFAULTS.get(flag.name, flag.default)
    if expected == NONE:
        assert option.default in (None, "", False, ())
    elif expected in ("true", "false"):
        assert option.default is (expected == "true")
    else:
        assert str(option.default).removesuffix(".0") == expected.removesuffix(".0")


def _section(heading: str) -> str:
    return PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_page_lists_exactly_the_flags_of_triton() -> None:
    of_triton = _section("Flags of `tritonserver`")
    rows = re.findall(r"^\| `--([a-z0-9-]+)` \|", of_triton, re.MULTILINE)
    assert sorted(rows) == sorted(flag.name for flag in FLAGS)


def test_the_page_lists_limits_with_their_defaults() -> None:
    of_limits = _section("Limits for clients")
    listed: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`--.*?) \| (.*?) \|", of_limits, re.MULTILINE):
        listed |= zip(re.findall(r"`--(.*?)`", names), defaults.split(", "), strict=True)
    flags = {field.name.replace("_", "-"): field.default for field in fields(LimitFlags)}
    known_to_triton = {flag.name for flag in FLAGS}
    assert listed == {
        name: "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
        for name, default in flags.items()
        if name not in known_to_triton
    }


def test_the_page_names_every_flag_without_effect_as_such() -> None:
    table = _section("Flags of `tritonserver`")
    without = re.findall(r"^\| `--([a-z0-9-]+)` \|.*\| no effect: ", table, re.MULTILINE)
    assert {name.replace("-", "_") for name in without} == set(TRITON)


def every_flag(repository: Path, *, joined: bool) -> list[str]:
    """The command line with every flag of Triton, as `--flag=value` or as `--flag value`."""
    arguments: list[str] = []
    for flag in FLAGS:
        if flag.name in TAKEN_ALONE:
            continue
        if flag.name.endswith(("-address", "http-port", "grpc-port", "metrics-port")) and "reuse" not in flag.name:
            continue  # start_server gives these
        value = flag.value.replace("$REPOSITORY", str(repository))
        if value == NONE:
            arguments.append(f"--{flag.name}")
        else:
            arguments += [f"--{flag.name}={value}"] if joined else [f"--{flag.name}", value]
    return arguments


def test_a_server_starts_with_every_flag_of_triton_at_once(
    make_server: MakeServer, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = make_server(*every_flag(repository, joined=True))
    assert '"name":"myserver"' in server.get("/v2") and server.get("/v2/models/echo/config")
    assert stop_server(server) == 0
    log = capfd.readouterr().err + read_log(repository)
    for name, reason in TRITON.items():
        assert log.count(f"--{name.replace('_', '-')} has no effect: {reason}") == 1, name


def read_log(repository: Path) -> str:
    """What went to --log-file."""
    file = repository.parent / "server.log"
    return file.read_text() if file.exists() else ""


def test_a_value_behind_a_space_means_the_same(repository: Path, command_line: CommandLine) -> None:
    with_equals_sign, with_space = (
        command_line.settings(*every_flag(repository, joined=joined)) for joined in (True, False)
    )
    assert with_equals_sign == with_space
    assert with_space.options.server_id == "myserver"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--model-config-name=",
            'Bad option: "--model-config-name".\nempty argument for --model-config-name',
        ),
        (
            "--model-control-mode=bogus",
            'Bad option: "--model-control-mode".\ninvalid argument for --model-control-mode',
        ),
        ("--log-format=xml", 'Bad option: "--log-format".\ninvalid argument for --log-format'),
        ("--allow-http=maybe", 'Bad option: "--allow-http".\n--allow-http: invalid value for bool option: maybe'),
        ("--exit-timeout-secs=soon", 'Bad option: "--exit-timeout-secs".\n'),
        ("--model-repository=/nowhere", "Bad option: \"--model-repository\".\n--model-repository: '/nowhere' does not"),
        ("--nosuch-flag=1", "No such option: --nosuch-flag"),
        ("/nowhere", "Bad option: \"--model\".\n--model is '/nowhere', which does not exist"),
    ],
)
def test_a_wrong_flag_ends_with_the_reason_at_the_bottom_and_exit_code_1(
    refusal: Refusal, tmp_path: Path, argument: str, message: str
) -> None:
    usage, _, reason = refusal(f"--model-repository={tmp_path}", argument).partition("\n\n")
    assert usage.startswith("Usage: llmbackend serve") and reason.startswith(message), usage + reason


def test_two_protocols_can_not_have_one_port(refusal: Refusal, tmp_path: Path) -> None:
    ports = ("--http-address=127.0.0.1", "--http-port=18001", "--grpc-address=127.0.0.1", "--grpc-port=18001")
    assert refusal(f"--model-repository={tmp_path}", *ports).strip() == (
        "The server cannot listen to HTTP requests and GRPC requests at the same address and port 127.0.0.1:18001"
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("1", True), ("On", True), ("FALSE", False), ("0", False)]
)
def test_a_boolean_is_read_as_triton_reads_it(text: str, expected: bool) -> None:
    context = typer.Context(get_command(app))
    assert options()["allow-http"].process_value(context, text) is expected


@dataclass(frozen=True)
class Life:
    """What was seen of a server from its start to its end: models `echo`, and `bad`, which does not load."""

    server: ServerProcess
    ready: str
    metrics: str
    log: str


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("life")
    repository = write_repository(folder)
    (repository / "bad").mkdir()
    (repository / "bad" / "config.pbtxt").write_text('backend: "nosuch"\n')
    (repository / "bad" / "1").mkdir()
    flags = ("--strict-model-config=false", "--exit-on-error=false", "--strict-readiness=false")
    with (folder / "stderr").open("w") as log:
        server = start_server("--model-store", str(repository), *flags, "--allow-cpu-metrics=false", log=log)
        ready = server.get("/v2/health/ready")
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
        assert stop_server(server) == 0
    return Life(server, ready, metrics, (folder / "stderr").read_text())


def test_a_flag_that_was_not_given_is_not_mentioned(life: Life) -> None:
    assert "has no effect" not in life.log
    assert (
        "'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead." in life.log
    )


def test_metrics_of_the_machine_can_be_left_out(life: Life) -> None:
    assert "nv_inference_count" in life.metrics and "nv_cpu_" not in life.metrics


def test_the_log_has_the_lines_and_tables_that_tools_wait_for(life: Life) -> None:
    assert life.ready == ""
    for line in (
        f"Started GRPCInferenceService at {life.server.grpc}",
        f"Started HTTPService at {life.server.http}",
        f"Started Metrics Service at {life.server.metrics}",
        "successfully loaded 'echo'",
        "failed to load 'bad' version 1: Invalid argument: unable to find backend library for backend 'nosuch'",
        "| Repository Agent | Path |",
        "| Model | Version | Status ",
        "| echo  | 1       | READY  ",
        "| bad   | 1       | UNAVAILABLE: Invalid argument: unable to find backend library",
        "Waiting for in-flight requests to complete.",
        "All models are stopped, unloading models",
        "live models and 0 in-flight non-inference requests",
        "successfully unloaded 'echo' version 1",
    ):
        assert line in life.log, line
    assert re.search(r"^\| echo +\| \S+/models/echo +\| \{\"cmdline\":\{", life.log, re.MULTILINE)


def test_reuse_port_lets_servers_share_a_port(make_server: MakeServer, repository: Path) -> None:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        http, rpc = (one.getsockname()[1] for one in (first, second))
    shared = ["--model-repository", str(repository), "--allow-metrics=false", "--http-address=127.0.0.1"]
    shared += [f"--http-port={http}", "--grpc-address=127.0.0.1", f"--grpc-port={rpc}"]
    command = [sys.executable, "-m", "llmbackend.cli", "serve", *shared, "--reuse-http-port=1", "--reuse-grpc-port=1"]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for server in servers:
            assert server.stdout is not None
            assert any(line.startswith("grpc") for line in server.stdout)
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2/health/ready", timeout=30) as answer:
            assert answer.status == 200
        with grpc.insecure_channel(f"127.0.0.1:{rpc}") as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        alone = run(*shared)
        assert alone.returncode == 1 and "cannot listen" in alone.stderr
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.communicate(timeout=40)


def test_poll_mode_from_the_command_line(
    make_server: MakeServer, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = make_server(
        "--model-repository", str(repository), "--model-control-mode=POLL", "--repository-poll-secs=0.1"
    )
    assert post(server, INDEX, {}) == (200, '[{"name":"echo","version":"1","state":"READY"}]')
    (repository / "echo").rename(repository.parent / "aside")
    eventually(lambda: post(server, INDEX, {}) == (200, "[]") and "successfully unloaded" in capfd.readouterr().err)
    (repository.parent / "aside").rename(repository / "echo")
    eventually(lambda: "READY" in post(server, INDEX, {})[1])
    refused = {"error": "explicit model load / unload is not allowed if polling is enabled"}
    status, body = post(server, "/v2/repository/models/echo/load", {})
    assert (status, json.loads(body)) == (503, refused)
    assert stop_server(server) == 0
