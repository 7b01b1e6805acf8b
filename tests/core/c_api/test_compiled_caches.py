"""A response cache that is a shared library, for models of any backend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmbackend.core.errors import TritonError
from tests.core.test_response_cache import COUNTING_BACKEND
from tests.helpers.compiled_backends import Libraries
from tests.helpers.core_host import Repository, send, serving, x

CACHED = "response_cache { enable: true }"
NVIDIAS = os.environ.get("LLMBACKEND_TRITON_CACHES")
"""A folder with NVIDIA's `local/libtritoncache_local.so`, to run the test with it, too."""


@pytest.fixture
def cached(repository: Repository) -> Repository:
    repository.backend("counting", COUNTING_BACKEND)
    repository.model("m", "counting", CACHED)
    return repository


def answers(cached: Repository, name: str, directory: Path) -> list[list[float]]:
    config = {name: {"size": "1048576"}}
    with serving(cached, "m", cache_config=config, cache_directory=directory) as server:
        found = []
        for value in (1, 1, 2, 1):
            (response,) = send(server, "m", x(value)).responses()
            assert response.error is None
            found.append([tensor.data.tolist() for tensor in response.outputs])
        hits = server.model_statistics("m")[0].inference_stats.cache_hit.count
        assert hits == 2
        return found


def test_a_compiled_cache_answers_in_place_of_the_model(cached: Repository, libraries: Libraries) -> None:
    folder = cached.models.parent / "caches" / "map"
    folder.mkdir(parents=True)
    (folder / "libtritoncache_map.so").symlink_to(libraries.library("map_cache"))
    first, again, other, third = answers(cached, "map", folder.parent)
    assert first == again == third != other


@pytest.mark.skipif(not NVIDIAS, reason="LLMBACKEND_TRITON_CACHES names no folder")
def test_nvidias_local_cache(cached: Repository) -> None:
    first, again, other, third = answers(cached, "local", Path(str(NVIDIAS)))
    assert first == again == third != other


def test_the_error_of_a_caches_initialisation_stops_the_start(cached: Repository, libraries: Libraries) -> None:
    folder = cached.models.parent / "caches" / "map"
    folder.mkdir(parents=True)
    (folder / "libtritoncache_map.so").symlink_to(libraries.library("map_cache"))
    with (
        pytest.raises(TritonError, match="a setting 'size' is expected"),
        serving(cached, cache_config={"map": {"other": "1"}}, cache_directory=folder.parent),
    ):
        pass
