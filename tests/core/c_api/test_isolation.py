"""isolation=process: an instance may die without the host."""

from __future__ import annotations

import os

import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from tests.helpers.compiled_backends import DECOUPLED, TEXT_IO, CompiledRepository, Libraries, ask, text_of
from tests.helpers.core_host import serving
from tests.helpers.waiting import eventually

TWO_INSTANCES = "instance_group { count: 2 kind: KIND_CPU }"


def test_each_instance_has_a_process(isolated: CompiledRepository) -> None:
    isolated.model("m", "faulty", TWO_INSTANCES, io=TEXT_IO)
    with serving(isolated, "m") as server:
        eventually(lambda: len({text_of(ask(server, "echo")) for _ in range(20)} - {str(os.getpid())}) == 2)


def test_a_crash_ends_its_requests_with_an_error_and_the_instance_starts_again(isolated: CompiledRepository) -> None:
    isolated.model("m", "faulty", DECOUPLED, io=TEXT_IO)
    with serving(isolated, "m") as server:
        before = text_of(ask(server, "echo"))
        first, last = ask(server, "crash").responses()
        assert first.outputs[0].data.item() == b"soon"
        assert last.error is not None and last.error.code is ErrorCode.INTERNAL
        assert "not healthy. It ended with exit code 7." in last.error.message
        assert text_of(ask(server, "echo")) != before
        statistics = server.model_statistics("m")[0].inference_stats
        assert (statistics.success.count, statistics.fail.count) == (0, 1)  # `faulty` reports no success


def test_requests_that_a_killed_process_has_are_ended(isolated: CompiledRepository) -> None:
    isolated.model("m", "faulty", io=TEXT_IO)
    with serving(isolated, "m") as server:
        held = [ask(server, "hold") for _ in range(8)]
        pid = int(text_of(ask(server, "echo")))  # the others are in the process by now
        assert server.kill_instance("m", -1, "m_0") == [pid]
        for client in held:
            (response,) = client.responses()
            assert response.error is not None and "SIGKILL" in response.error.message
        assert text_of(ask(server, "echo")) != str(pid)


def test_an_instance_whose_own_process_dies_starts_again(isolated: CompiledRepository) -> None:
    isolated.model("m", "faulty", io=TEXT_IO)
    with serving(isolated, "m") as server:
        before = text_of(ask(server, "echo"))
        held = ask(server, "hold")
        for client in (ask(server, "orphan"), held):
            (response,) = client.responses()
            assert response.error is not None and "not healthy. It ended by signal SIGKILL." in response.error.message
        assert text_of(ask(server, "echo")) != before


def test_a_cancellation_reaches_the_process(isolated: CompiledRepository) -> None:
    isolated.model("m", "faulty", io=TEXT_IO)
    with serving(isolated, "m") as server:
        client = ask(server, "hold")
        text_of(ask(server, "echo"))
        client.cancel()
        (response,) = client.responses()
        assert response.error is not None and response.error.message == "cancelled while it was held"


def test_requests_that_can_not_be_sent_to_the_process_fail_and_are_forgotten(
    isolated: CompiledRepository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no descriptors")

    isolated.model("m", "faulty", io=TEXT_IO)
    with serving(isolated, "m") as server:
        assert text_of(ask(server, "echo"))
        with monkeypatch.context() as patched:
            patched.setattr("llmbackend.backends.python.stub_process.encode", fail)
            error = ask(server, "echo").error()
        assert error.code is ErrorCode.INTERNAL and "no descriptors" in error.message
        server.kill_instance("m", -1, "m_0")
        eventually(lambda: "restarting it" in caplog.text)
        assert text_of(ask(server, "echo"))
    assert "could not be ended" not in caplog.text


def test_an_unknown_isolation_is_refused(isolated: CompiledRepository) -> None:
    isolated.model("m", "faulty", io=TEXT_IO)
    settings = {"faulty": {"isolation": "thread"}}
    with (
        serving(isolated, backend_config=settings) as server,
        pytest.raises(TritonError, match="'thread', expected 'p"),
    ):
        server.load_model("m")


def test_a_library_without_execute_is_refused(isolated: CompiledRepository, libraries: Libraries) -> None:
    isolated.model("m", "none", io=TEXT_IO)
    (isolated.backends / "none").mkdir()
    (isolated.backends / "none" / "libtriton_none.so").symlink_to(libraries.library("map_cache"))
    with serving(isolated) as server, pytest.raises(TritonError, match="unable to find required entrypoint"):
        server.load_model("m")
