"""`serve --cluster auto` on one machine, with a real Ray: engines are its actors', and hosts do not notice."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cluster import engines_of, processes_of, run_folder, start_machine
from tests.helpers.server_process import ServerProcess, post, stop_server, write_mock_model
from tests.helpers.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LONG = {"text_input": "abc", "parameters": {"max_tokens": 200, "ignore_eos": True, "seed": 3}}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository, secrets = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("secrets") / "cluster"
    write_mock_model(repository, mock_step_ms=5.0)
    server = start_machine(folder, secrets, "--model-repository", str(repository))
    yield server
    stop_server(server)


def test_the_engine_belongs_to_ray(server: ServerProcess, folder: Path) -> None:
    commands = list(processes_of(folder).values())
    assert any("ray::EngineActor" in command for command in commands)
    (engine,) = engines_of(folder)
    assert Path(f"/proc/{engine.pid}").exists()
    assert post(server, "/v2/models/mock/generate", LONG)[0] == 200


def test_nothing_of_ray_listens_beyond_loopback(server: ServerProcess, folder: Path) -> None:
    inodes = {
        os.readlink(descriptor)
        for pid in processes_of(folder)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir()
        if descriptor.is_symlink()
    }
    listening = [
        (line.split()[1], f"socket:[{line.split()[9]}]")
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    ours = [address.rpartition(":")[0] for address, inode in listening if inode in inodes]
    assert ours
    assert {address[-8:] for address in ours} == {"0100007F"}


@pytest.mark.parametrize("which", ["the engine's process", "the command that keeps it", "its actor"])
def test_a_killed_engine_is_replaced_under_a_stream(server: ServerProcess, folder: Path, which: str) -> None:
    (engine,) = engines_of(folder)
    status, expected = post(server, "/v2/models/mock/generate", LONG)
    assert status == 200
    answers: list[tuple[int, str]] = []
    client = threading.Thread(target=lambda: answers.append(post(server, "/v2/models/mock/generate", LONG)))
    client.start()
    eventually(lambda: server.metric("vllm:num_requests_running", "mock") > 0)
    actor = next(pid for pid, command in processes_of(folder).items() if "ray::EngineActor" in command)
    os.kill({"the engine's process": engine.news.pid, "the command that keeps it": engine.pid}.get(which, actor), 9)
    client.join(60)
    assert answers == [(200, expected)]
    if which == "its actor":
        eventually(lambda: engines_of(folder) == [engine])
        assert Path(f"/proc/{engine.news.pid}").exists(), "the engine outlives its actor"


def test_a_signal_ends_everything(server: ServerProcess, folder: Path) -> None:
    """Last: the server is gone afterwards."""
    assert stop_server(server) == 0
    assert not processes_of(folder)
    assert not engines_of(folder)
