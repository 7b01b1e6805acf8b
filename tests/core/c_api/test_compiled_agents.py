"""A repository agent that is a shared library."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmbackend.core.errors import TritonError
from tests.helpers.compiled_backends import Libraries
from tests.helpers.core_backends import VERSIONED_BACKEND, answer
from tests.helpers.core_host import Repository, serving


@pytest.fixture
def agents(repository: Repository, libraries: Libraries, tmp_path: Path) -> Path:
    """The directory of agents. `m` has its files from `tmp_path/store`."""
    folder = tmp_path / "agents" / "fetch"
    folder.mkdir(parents=True)
    (folder / "libtritonrepoagent_fetch.so").symlink_to(libraries.library("fetch_agent"))
    repository.backend("v", VERSIONED_BACKEND)
    return folder.parent


def named(log: Path, store: Path | None = None) -> str:
    source = f'parameters {{ key: "from" value: "{store}" }}' if store else ""
    return (
        f'model_repository_agents {{ agents {{ name: "fetch" {source} parameters {{ key: "log" value: "{log}" }} }} }}'
    )


def test_an_agent_brings_the_files_of_a_model(repository: Repository, agents: Path, tmp_path: Path) -> None:
    log, store = tmp_path / "actions", tmp_path / "store"
    (store / "3").mkdir(parents=True)
    (store / "3" / "text").write_text("fetched")
    repository.model("m", "v", named(log, store), versions=(2,))
    with serving(repository, repoagent_directory=agents) as server:
        server.load_model("m")
        assert answer(server) == "fetched"
        server.unload_model("m")
    assert log.read_text() == "0134"  # LOAD, LOAD_COMPLETE, UNLOAD, UNLOAD_COMPLETE


def test_an_agent_refuses_a_model(repository: Repository, agents: Path, tmp_path: Path) -> None:
    log = tmp_path / "actions"
    repository.model("m", "v", named(log))
    with (
        serving(repository, repoagent_directory=agents) as server,
        pytest.raises(TritonError, match="failed to load 'm'"),
    ):
        server.load_model("m")
    assert log.read_text() == "02"  # LOAD, LOAD_FAIL
