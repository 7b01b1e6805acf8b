"""Engines added to and taken from a model that streams: no request is lost, no text changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from tests.helpers.live_stream import PROTOCOLS, LiveStream
from tests.helpers.server_process import ServerProcess, post, stop_server, write_mock_model
from tests.helpers.waiting import eventually

MakeServer = Callable[..., ServerProcess]


def set_instances(repository: Path, count: int) -> None:
    (repository / "slow" / "config.pbtxt").write_text(
        f'backend: "llm"\ninstance_group [ {{ kind: KIND_MODEL count: {count} }} ]\n'
    )


def engines(server: ServerProcess) -> int:
    """How many engine processes there are, the children of the fork server that they share."""
    return sum(len(fork_server.children()) for fork_server in psutil.Process(server.process.pid).children())


def has_engines(server: ServerProcess, count: int) -> bool:
    return engines(server) == count


def streams(server: ServerProcess) -> list[LiveStream]:
    return [
        LiveStream(server, protocol, "slow", f"{protocol} {number}", 60)
        for protocol in PROTOCOLS
        for number in range(2)
    ]


def load(server: ServerProcess) -> None:
    assert post(server, "/v2/repository/models/slow/load", {}) == (200, "")


def test_engines_come_and_go_under_live_streams(make_server: MakeServer, tmp_path: Path) -> None:
    write_mock_model(tmp_path, "slow", mock_step_ms=10)
    set_instances(tmp_path, 1)
    server = make_server("--model-repository", str(tmp_path), "--model-control-mode=explicit", "--load-model=slow")
    undisturbed = [stream.finish() for stream in streams(server)]
    assert engines(server) == 1
    for count in (3, 1, 2, 1):
        running = [stream.wait_until_begun() for stream in streams(server)]
        set_instances(tmp_path, count)
        load(server)
        after = streams(server)
        assert [stream.finish() for stream in (*running, *after)] == undisturbed * 2
        assert not any(stream.error or stream.broken for stream in (*running, *after))
        eventually(partial(has_engines, server, count))
    assert server.get("/v2/models/slow/ready") == ""
    config = json.loads(server.get("/v2/models/slow/config"))
    assert config["instance_group"][0]["count"] == 1
    server.wait_until_idle("slow")
    assert stop_server(server) == 0
