"""`llmbackend serve ORG/NAME` against a stand-in of the hub on loopback: what is fetched, kept and said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbackend.demo import DEMO_REPOSITORY
from tests.helpers.hub import Hub, hub_environment, hub_of
from tests.helpers.server_process import post, running_server, start_server, stop_server

MODEL = "org/tiny"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hub_of(DEMO_REPOSITORY / "demo" / "1", MODEL) as hub:
        yield hub


def refused(*arguments: str, variables: dict[str, str]) -> str:
    """The last line of a command that does not start."""
    command = [sys.executable, "-m", "llmbackend.cli", "serve", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables, check=False)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr.rstrip().splitlines()[-1]


def test_a_model_of_the_hub_is_fetched_once_also_over_connections_that_break(hub: Hub, tmp_path: Path) -> None:
    hub.asked.clear()
    hub.num_breaks = 1
    with running_server(MODEL, "--revision=v1", "--device=cpu", variables=hub_environment(hub, tmp_path)) as server:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        status, answer = post(server, "/v1/completions", body)
        assert (status, json.loads(answer)["model"]) == (200, MODEL)
    fetched = [line for line in hub.asked if line.startswith("GET") and "resolve" in line]
    assert [line.rpartition("/")[2] for line in fetched].count("model.safetensors") == 2
    assert not any("pytorch_model.bin" in line or "onnx" in line for line in fetched)

    # From the cache: without the hub, and without being asked.
    hub.asked.clear()
    server = start_server(MODEL, "--revision=v1", variables=hub_environment(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert stop_server(server) == 0
    assert hub.asked == []


def test_files_that_are_there_are_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.num_breaks = 99
    assert "cannot be fetched from the hub" in refused(MODEL, variables=hub_environment(hub, tmp_path))
    hub.num_breaks = 0
    hub.asked.clear()
    assert stop_server(start_server(MODEL, variables=hub_environment(hub, tmp_path))) == 0
    fetched = [line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "resolve" in line]
    assert fetched == ["model.safetensors"]


def test_a_folder_for_downloads(hub: Hub, tmp_path: Path) -> None:
    server = start_server(
        MODEL, "--download-dir", str(tmp_path / "here"), variables=hub_environment(hub, tmp_path / "home")
    )
    assert stop_server(server) == 0
    assert list((tmp_path / "here").glob("models--org--tiny/snapshots/*/model.safetensors"))
    assert not (tmp_path / "home" / "hub").exists()
    shutil.rmtree(tmp_path / "here")


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (("org/none",), {}, "'org/none' is neither a directory here nor a model of the hub (http://127.0.0.1:"),
        (("org/gated",), {}, "'org/gated' is gated: accept its terms on the hub ("),
        ((MODEL, "--revision", "v9"), {}, "'org/tiny' has no revision 'v9' on the hub ("),
        ((MODEL,), {"HF_HUB_OFFLINE": "1"}, "'org/tiny' is not a directory here, and not in the cache '"),
        ((MODEL,), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub (http://127.0.0.1:9) cannot be reached"),
    ],
)
def test_what_cannot_be_fetched(
    hub: Hub, tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], reason: str
) -> None:
    assert reason in refused(*arguments, variables=hub_environment(hub, tmp_path) | variables)
