"""`llmbackend top`: the state that a feed's events make, the screen at any size, and a real server being watched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llmbackend.cli.terminal_text import bar
from llmbackend.cli.top.feed_state import WINDOW_S, FeedState, figures
from llmbackend.cli.top.screen import View, render
from tests.helpers.server_process import (
    ServerProcess,
    post,
    running_server,
    start_server,
    stop_server,
    write_mock_model,
)
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.slow

WHERE = {"model": "demo", "version": "1", "instance": "demo_0"}
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512, "num_blocks": 100, "block_size": 8}


def request(number: int, **fields: Any) -> dict[str, Any]:
    row = {"request": number, "id": f"id-{number}", "key": "", "received": 1000.0 + number, "prompt_tokens": 8}
    return {**row, "max_tokens": 20, "state": "waiting", "reason": "", "output_tokens": 0, **fields}


def snapshot(*requests: dict[str, Any]) -> dict[str, Any]:
    row = {**WHERE, "state": "ready", "pid": 7, "num_restarts": 0, "limits": LIMITS, "requests": list(requests)}
    server = {"name": "triton", "version": "0.1.0"}
    return {"time": 1010.0, "server": server, "scope": "all", "allows_kill": False, "instances": [row]}


def step(rows: list[list[Any]], **fields: Any) -> dict[str, Any]:
    found = {"step": 1, "time": 1011.0, "duration_ms": 20.0, "rows": rows, "preempted": [], "waiting": []}
    blocks = {"used": 25, "cached": 5, "free": 70}
    return {**found, "num_running": len(rows), "num_waiting": 0, "blocks": blocks, **fields}


def state_of(*events: tuple[str, dict[str, Any]]) -> FeedState:
    """All came at 100 s of the local clock."""
    state = FeedState()
    for name, data in events:
        state.apply(name, data, 100.0)
    return state


def text_of(state: FeedState, width: int = 120, height: int = 30, now_s: float = 102.0, notice: str = "") -> str:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(render(state, View("http://host:8000", width, height, now_s, notice)))
    return capture.get()


STEPS = {**WHERE, "steps": [step([[1, "prefill", 8, 0, 1], [2, "decode", 1, 0, 1]], waiting=[[3, "kv_blocks"]])]}


def test_steps_give_rates_and_progress() -> None:
    state = state_of(("snapshot", snapshot(request(1), request(2), request(3))), ("steps", STEPS), ("steps", STEPS))
    [row] = figures(state, 102.0)
    assert (row.output_tokens_per_s, row.prompt_tokens_per_s, row.steps_per_s) == (2.0, 8.0, 1.0)
    assert (row.step_ms, row.used_blocks, row.num_running) == (20.0, 25, 2)
    found = state.instances["demo", "1", "demo_0"].requests
    assert [(each.state, each.reason, each.output_tokens) for each in found.values()] == [
        ("running", "", 2), ("running", "", 2), ("waiting", "kv_blocks", 0),
    ]  # fmt: skip
    [idle] = figures(state, 100.0 + WINDOW_S + 0.1)
    assert (idle.output_tokens_per_s, idle.step_ms) == (0.0, None)


def test_requests_move_between_instances_and_end() -> None:
    other = {**WHERE, "instance": "demo_1"}
    state = state_of(
        ("snapshot", snapshot(request(1))),
        ("requests", {**WHERE, "received": [request(2)], "ended": []}),
        ("requests", {**other, "received": [request(2, state="running")], "ended": []}),
        ("requests", {**WHERE, "received": [], "ended": [{"request": 1, "time": 1012.0, "finish_reason": "stop",
                                                          "output_tokens": 5, "num_preemptions": 1}]}),
        ("requests", {**WHERE, "received": [], "ended": [{"request": 99, "time": 1012.0}]}),
    )  # fmt: skip
    assert {key[2]: list(each.requests) for key, each in state.instances.items()} == {"demo_0": [], "demo_1": [2]}
    [(_, ended)] = state.ended
    assert (ended.number, ended.state, ended.output_tokens) == (1, "stop", 5)
    assert "stop (preempted 1)" in text_of(state)


def test_engines_die_load_and_stop() -> None:
    died = {**WHERE, "time": 1011.0, "state": "recovering", "reason": "killed by signal 9", "pid": None}
    state = state_of(
        ("snapshot", snapshot()),
        ("engine", {**died, "num_restarts": 1, "recovery_ms": None}),
        ("load", {**WHERE, "time": 1011.0, "stage": "reading weights", "done": 3, "total": 4}),
    )
    assert "reading weights 75 %" in text_of(state) and "demo_0: killed by signal 9" in text_of(state)
    state.apply("engine", {**died, "state": "ready", "pid": 8, "num_restarts": 1, "recovery_ms": 29.0}, 101.0)
    assert "1 (29 ms)" in text_of(state)
    state.apply("dropped", {"events": 3}, 101.0)
    state.apply("from a later version", {"anything": []}, 101.0)
    assert "3 events missed" in text_of(state)
    state.apply("engine", {**died, "state": "stopped"}, 101.0)
    assert not state.instances


def test_there_is_no_time_before_the_server_says_it() -> None:
    assert not re.search(r"\d\d:\d\d:\d\d", text_of(FeedState()))
    assert re.search(r"\d\d:\d\d:\d\d", text_of(state_of(("snapshot", snapshot()))))


def test_a_snapshot_says_nothing_of_an_engine_that_is_gone() -> None:
    died = {**WHERE, "time": 1011.0, "state": "recovering", "reason": "killed by signal 9", "pid": None}
    state = state_of(("snapshot", snapshot(request(1), request(2))), ("steps", STEPS), ("engine", died))
    state.apply("load", {**WHERE, "time": 1011.0, "stage": "reading weights"}, 101.0)
    state.apply("snapshot", snapshot(request(1)), 101.0)  # pid 7 is back
    [row] = figures(state, 101.0)
    assert (row.reason, row.loading, row.used_blocks, row.steps_per_s) == ("", "", 0, 0.0)
    state.apply("steps", STEPS, 101.0)
    state.apply("snapshot", snapshot(request(1)), 102.0)
    [row] = figures(state, 102.0)
    assert row.steps_per_s > 0


@pytest.mark.parametrize(("width", "height"), [(200, 50), (120, 30), (80, 24), (60, 15), (40, 10), (20, 5)])
def test_the_screen_fits_any_terminal(width: int, height: int) -> None:
    requests = [request(number, id=f"id\x1b[2J{number}" * 9) for number in range(40)]
    state = state_of(("snapshot", snapshot(*requests)), ("steps", STEPS))
    lines = text_of(state, width, height, notice="connection refused; connecting again").splitlines()
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_bars_are_in_eighths() -> None:
    assert [bar(share, 2) for share in (-1, 0, 1 / 16, 0.5, 0.75, 1, 7)] == ["░░", "░░", "▏░", "█░", "█▌", "██", "██"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_mock_model(repository, "slow", mock_step_ms=20, max_model_len=4096, max_num_seqs=2)
    with running_server("--model-repository", str(repository)) as running:
        yield running


def once(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmbackend.cli", "top", "--once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_server_is_watched_while_its_engine_dies(server: ServerProcess) -> None:
    body = {"model": "slow", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
    answers: list[int] = []
    clients = [threading.Thread(target=lambda: answers.append(post(server, "/v1/completions", body)[0])) for _ in "123"]
    with Terminal("top", "--url", server.http, "--interval-s", "0.1", columns=120) as terminal:
        terminal.wait_for("no requests")
        for client in clients:
            client.start()
        terminal.wait_for("2/2")
        terminal.wait_for("waiting: max_num_seqs")
        look = json.loads(once("--url", server.http, "--json", "--interval-s", "0.5").stdout)
        [instance] = look["instances"]
        assert (instance["model"], instance["state"], instance["num_running"]) == ("slow", "ready", 2)
        assert instance["output_tokens_per_s"] > 0 and len(instance["requests"]) == 3
        os.kill(instance["pid"], signal.SIGKILL)
        terminal.wait_for("SIGKILL")
        for client in clients:
            client.join()
        assert answers == [200] * 3
        terminal.wait_for("length")
        terminal.send("\x03")
        assert terminal.end() == 0


def test_top_comes_back_when_its_server_does(tmp_path: Path) -> None:
    write_mock_model(tmp_path, "mock")
    first = start_server("--model-repository", str(tmp_path))
    port = int(first.http.rpartition(":")[2])
    with Terminal("top", "--url", first.http, "--interval-s", "0.1", columns=120) as terminal:
        terminal.wait_for("mock_0")
        stop_server(first)
        terminal.wait_for("connecting again")
        second = start_server("--model-repository", str(tmp_path), http_port=port)
        terminal.wait_for("mock_0")
        terminal.send("\x03")
        assert terminal.end() == 0
        assert stop_server(second) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--url", "{http}", "--model", "nope"], "has no loaded model 'nope'"),
        (["--url", "http://127.0.0.1:1"], "no server at http://127.0.0.1:1: connection refused"),
        (["--url", "{http}/v1"], "--url is its HTTP port, without a path"),
    ],
)
def test_what_goes_wrong_is_said(server: ServerProcess, arguments: list[str], expected: str) -> None:
    done = once(*(each.format(http=server.http) for each in arguments))
    assert done.returncode == 1
    assert expected in done.stderr and "Traceback" not in done.stderr


def test_without_a_terminal_it_asks_for_once() -> None:
    command = [sys.executable, "-m", "llmbackend.cli", "top"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "expected --once" in done.stderr
