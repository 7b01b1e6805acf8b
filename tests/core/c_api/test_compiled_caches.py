"""A response cache that is a shared library, for models of any backend."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.c_api.library import CompiledCache
from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.core.test_response_cache import COUNTING_BACKEND
from tests.helpers.compiled_backends import Libraries
from tests.helpers.core_host import Repository, send, serving, x
from tests.helpers.waiting import eventually

CACHED = "response_cache { enable: true }"
NVIDIAS = os.environ.get("LLMBACKEND_TRITON_CACHES")
"""A folder with NVIDIA's `local/libtritoncache_local.so`, to run the test with it, too."""


@pytest.fixture
def cached(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setattr("llmbackend.core.caching.COMPILED_CACHE_WAIT_TIMEOUT_S", 60.0)  # no lookup is skipped
    repository.backend("counting", COUNTING_BACKEND)
    repository.model("m", "counting", CACHED)
    return repository


@pytest.fixture
def directory(cached: Repository, libraries: Libraries) -> Path:
    """Has the cache `map`."""
    folder = cached.models.parent / "caches" / "map"
    folder.mkdir(parents=True)
    (folder / "libtritoncache_map.so").symlink_to(libraries.library("map_cache"))
    return folder.parent


def lookups(server: InferenceServer) -> int:
    """Those that have ended; a miss ends with its insertion."""
    counts = server.model_statistics("m")[0].inference_stats
    return int(counts.cache_hit.count + counts.cache_miss.count)


def answers(cached: Repository, name: str, directory: Path) -> list[list[float]]:
    config = {name: {"size": "1048576"}}
    found: list[list[float]] = []
    with serving(cached, "m", cache_config=config, cache_directory=directory) as server:
        for value in (1, 1, 2, 1):
            (response,) = send(server, "m", x(value)).responses()
            assert response.error is None
            found.append([tensor.data.tolist() for tensor in response.outputs])
            eventually(lambda: lookups(server) == len(found))
        assert server.model_statistics("m")[0].inference_stats.cache_hit.count == 2
    return found


def test_a_compiled_cache_answers_in_place_of_the_model(
    cached: Repository, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, again, other, third = answers(cached, "map", directory)
    assert first == again == third != other
    assert "Failed to retrieve key" not in caplog.text


@pytest.mark.skipif(not NVIDIAS, reason="LLMBACKEND_TRITON_CACHES names no folder")
def test_nvidias_local_cache(cached: Repository) -> None:
    first, again, other, third = answers(cached, "local", Path(str(NVIDIAS)))
    assert first == again == third != other


def test_its_functions_run_on_threads_of_their_own(
    cached: Repository, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event loop asks for a lookup, and an insertion comes under the lock of a request's responses."""
    callers: list[str] = []

    def noting(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            callers.append(threading.current_thread().name)
            return function(*arguments)

        return call

    for name in ("lookup", "insert"):
        monkeypatch.setattr(CompiledCache, name, noting(getattr(CompiledCache, name)))
    answers(cached, "map", directory)
    assert len(callers) == 6 and all(caller.startswith("response-cache") for caller in callers)


def test_a_lookup_that_fails_is_a_miss_and_logged(
    cached: Repository, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"map": {"size": "1048576", "away": "1"}}
    with serving(cached, "m", cache_config=config, cache_directory=directory) as server:
        assert send(server, "m", x(1)).responses()[0].error is None
        eventually(lambda: lookups(server) == 1)
    assert "Failed to retrieve key" in caplog.text and "Unavailable: the cache is away" in caplog.text


def test_the_error_of_a_caches_initialisation_stops_the_start(cached: Repository, directory: Path) -> None:
    with (
        pytest.raises(TritonError, match="a setting 'size' is expected"),
        serving(cached, cache_config={"map": {"other": "1"}}, cache_directory=directory),
    ):
        pass
