"""What the host does when a function of a compiled backend returns an error: backends/failing.cpp."""

from __future__ import annotations

import logging
import threading

import pytest

from llmbackend.core.c_api import host_calls
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.compiled_backends import TEXT_IO, CompiledRepository, ask, text_of
from tests.helpers.core_host import serving
from tests.helpers.waiting import eventually

ONE_INSTANCE = "instance_group { count: 1 }"


def failing(inside: CompiledRepository, function: str, config: str = ONE_INSTANCE) -> None:
    inside.model(
        "m", "failing", f'{config} parameters {{ key: "fail" value {{ string_value: "{function}" }} }}', io=TEXT_IO
    )


def load_error(server: InferenceServer) -> str:
    with pytest.raises(TritonError) as caught:
        server.load_model("m")
    return caught.value.message


def functions_called(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.filename == "failing.cpp"]


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.fixture(autouse=True)
def nothing_is_left() -> object:
    """Whatever failed, neither a thread of a model nor a maker of metrics stays."""
    makers = len(host_calls.family_makers)
    yield
    assert len(host_calls.family_makers) == makers
    assert not [thread.name for thread in threading.enumerate() if thread.name == "compiled-backend-responses"]


def test_initialize_of_the_backend(inside: CompiledRepository, caplog: pytest.LogCaptureFixture) -> None:
    inside.model("m", "failing", io=TEXT_IO)
    settings = {"failing": {"fail": "Initialize"}}
    with caplog.at_level(logging.INFO, "llmbackend"), serving(inside, backend_config=settings) as server:
        assert "Unavailable: Initialize fails" in load_error(server)
    assert functions_called(caplog) == ["Initialize", "Finalize"]


def test_model_initialize(inside: CompiledRepository, caplog: pytest.LogCaptureFixture) -> None:
    failing(inside, "ModelInitialize")
    with caplog.at_level(logging.INFO, "llmbackend"), serving(inside) as server:
        assert "Unavailable: ModelInitialize fails" in load_error(server)
    assert functions_called(caplog) == ["Initialize", "ModelInitialize", "ModelFinalize", "Finalize"]


def test_model_instance_initialize(inside: CompiledRepository, caplog: pytest.LogCaptureFixture) -> None:
    failing(inside, "ModelInstanceInitialize")
    with caplog.at_level(logging.INFO, "llmbackend"), serving(inside) as server:
        assert "Unavailable: ModelInstanceInitialize fails" in load_error(server)
    called = ["ModelInitialize", "ModelInstanceInitialize", "ModelInstanceFinalize", "ModelFinalize"]
    assert functions_called(caplog) == ["Initialize", *called, "Finalize"]


@pytest.mark.parametrize("function", ["ModelInstanceFinalize", "ModelFinalize"])
def test_a_finalizer_of_a_model(inside: CompiledRepository, caplog: pytest.LogCaptureFixture, function: str) -> None:
    failing(inside, function)
    with serving(inside, "m") as server:
        assert text_of(ask(server, "")) == "fine"
        server.unload_model("m")
        eventually(lambda: errors_logged(caplog))
        server.load_model("m")
        assert text_of(ask(server, "")) == "fine"
    assert (
        errors_logged(caplog)
        == [f"failed to finalize backend 'failing' (TRITONBACKEND_{function}): Unavailable: {function} fails"] * 2
    )


def test_finalize_of_the_backend(inside: CompiledRepository, caplog: pytest.LogCaptureFixture) -> None:
    inside.model("m", "failing", io=TEXT_IO)
    with serving(inside, "m", backend_config={"failing": {"fail": "Finalize"}}) as server:
        assert text_of(ask(server, "")) == "fine"
    assert errors_logged(caplog) == [
        "failed to finalize backend 'failing' (TRITONBACKEND_Finalize): Unavailable: Finalize fails"
    ]


@pytest.mark.parametrize(("fail", "count"), [("", 3), ("GetBackendAttribute", 1)])
def test_get_backend_attribute(backends: CompiledRepository, fail: str, count: int) -> None:
    """Where it fails, the defaults are used."""
    backends.model("m", "failing", io=TEXT_IO)
    with serving(backends, "m", backend_config={"failing": {"fail": fail}}) as server:
        assert [group.count for group in server.model_config("m").instance_group] == [count]
        assert text_of(ask(server, "")) == "fine"


def test_model_instance_ready(inside: CompiledRepository) -> None:
    failing(inside, "ModelInstanceReady")
    with serving(inside, "m") as server:
        assert not server.model_is_ready("m")
        assert text_of(ask(server, "")) == "fine"


def test_execute(backends: CompiledRepository) -> None:
    failing(backends, "ModelInstanceExecute")
    with serving(backends, "m") as server:
        clients = [ask(server, "") for _ in range(5)]
        errors = [client.error() for client in clients]
        assert {(error.code, error.message) for error in errors} == {
            (ErrorCode.UNAVAILABLE, "ModelInstanceExecute fails")
        }
        assert server.model_statistics("m")[0].inference_stats.fail.count == 5
