"""isolation=process: an instance may die without the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from tests.helpers.core_host import Repository, serving
from tests.helpers.waiting import eventually

from .test_compiled_backends import DECOUPLED, TEXT_IO, ask, text_of

ISOLATED = {"": {"isolation": "process"}}
TWO_INSTANCES = "instance_group { count: 2 kind: KIND_CPU }"


@pytest.fixture
def faulty(repository: Repository, compiled: Path) -> Repository:
    """A repository with the backend `faulty`, which is run in processes."""
    repository.defaults["backend_config"] = ISOLATED
    (repository.backends / "faulty").mkdir()
    (repository.backends / "faulty" / "libtriton_faulty.so").symlink_to(compiled / "libtriton_faulty.so")
    return repository


def test_each_instance_has_a_process(faulty: Repository) -> None:
    faulty.model("m", "faulty", TWO_INSTANCES, io=TEXT_IO)
    with serving(faulty, "m") as server:
        eventually(lambda: len({text_of(ask(server, "echo")) for _ in range(20)} - {str(os.getpid())}) == 2)


def test_a_crash_ends_its_requests_with_an_error_and_the_instance_starts_again(faulty: Repository) -> None:
    faulty.model("m", "faulty", DECOUPLED, io=TEXT_IO)
    with serving(faulty, "m") as server:
        before = text_of(ask(server, "echo"))
        first, last = ask(server, "crash").responses()
        assert first.outputs[0].data.item() == b"soon"
        assert last.error is not None and last.error.code is ErrorCode.INTERNAL
        assert "not healthy. It ended with exit code 7." in last.error.message
        assert text_of(ask(server, "echo")) != before
        statistics = server.model_statistics("m")[0].inference_stats
        assert (statistics.success.count, statistics.fail.count) == (0, 1)  # `faulty` reports no success


def test_requests_that_a_killed_process_has_are_ended(faulty: Repository) -> None:
    faulty.model("m", "faulty", io=TEXT_IO)
    with serving(faulty, "m") as server:
        held = [ask(server, "hold") for _ in range(8)]
        pid = int(text_of(ask(server, "echo")))  # the others are in the process by now
        assert server.kill_instance("m", -1, "m_0") == [pid]
        for client in held:
            (response,) = client.responses()
            assert response.error is not None and "SIGKILL" in response.error.message
        assert text_of(ask(server, "echo")) != str(pid)


def test_a_cancellation_reaches_the_process(faulty: Repository) -> None:
    faulty.model("m", "faulty", io=TEXT_IO)
    with serving(faulty, "m") as server:
        client = ask(server, "hold")
        text_of(ask(server, "echo"))
        assert client.handle is not None
        client.handle.cancel()
        (response,) = client.responses()
        assert response.error is not None and response.error.message == "cancelled while it was held"


def test_an_unknown_isolation_is_refused(faulty: Repository) -> None:
    faulty.model("m", "faulty", io=TEXT_IO)
    settings = {"faulty": {"isolation": "thread"}}
    with serving(faulty, backend_config=settings) as server, pytest.raises(TritonError, match="'thread', expected 'p"):
        server.load_model("m")


def test_a_library_without_execute_is_refused(faulty: Repository, compiled: Path) -> None:
    faulty.model("m", "none", io=TEXT_IO)
    (faulty.backends / "none").mkdir()
    (faulty.backends / "none" / "libtriton_none.so").symlink_to(compiled / "libtriton_map_cache.so")
    with serving(faulty) as server, pytest.raises(TritonError, match="unable to find required entrypoint"):
        server.load_model("m")
