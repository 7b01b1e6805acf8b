"""Decoupled models of a compiled backend: the ways to answer, cancellation, and what is lost (backends/streams.cpp)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceResponse
from tests.helpers.compiled_backends import DECOUPLED, TEXT_IO, CompiledRepository, ask
from tests.helpers.core_host import serving


@pytest.fixture
def server(backends: CompiledRepository) -> Iterator[InferenceServer]:
    backends.model("m", "streams", DECOUPLED, io=TEXT_IO)
    with serving(backends, "m") as server:
        yield server


def texts(responses: Sequence[InferenceResponse | None]) -> list[str]:
    """The text of each response, or its error's."""
    return [
        response.outputs[0].data.item().decode() if response.error is None else f"error: {response.error.message}"
        for response in responses
        if response is not None
    ]


def test_responses_without_outputs(server: InferenceServer) -> None:
    responses = ask(server, "empty 5").responses()
    assert [(response.outputs, response.error) for response in responses] == [((), None)] * 5


def test_responses_with_parameters(server: InferenceServer) -> None:
    responses = ask(server, "parameters 3").responses()
    assert [response.parameters for response in responses] == [
        {"i": i, "b": bool(i % 2), "d": i + 0.5, "s": str(i)} for i in range(3)
    ]


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        ("none", []),
        ("deleted", ["other"]),
        ("two", ["a", "a", "b", "b"]),
        ("mixed", ["own", "factory's"]),
        ("errors", ["good", "error: a hitch", "error: the end"]),
    ],
)
def test_ways_to_answer(server: InferenceServer, command: str, answers: list[str]) -> None:
    assert texts(ask(server, command).responses()) == answers


def test_what_comes_after_final_is_dropped(server: InferenceServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llmbackend"):
        client = ask(server, "after")
        assert texts(client.responses()) == ["before"]
        server.unload_model("m")  # waits for the backend's threads
    assert client.events.empty()


def test_a_lost_factory_ends_its_request_with_an_error(server: InferenceServer) -> None:
    first, last = texts(ask(server, "lost").responses())
    assert first == "only"
    assert "ended the request without a response" in last


def test_an_output_that_does_not_fit_its_shape_is_an_error_of_its_response(server: InferenceServer) -> None:
    first, second = texts(ask(server, "unfit").responses())
    assert first.startswith("error: ") and "OUTPUT0" in first
    assert second == "fit"


def test_a_factory_sees_the_cancellation(server: InferenceServer) -> None:
    clients = [ask(server, "wait") for _ in range(3)]
    for client in clients:
        assert texts([client.next()[0]]) == ["waiting"]
        client.cancel()
    assert [client.error().message for client in clients] == ["stopped when it was cancelled"] * 3


def test_a_server_stops_while_factories_are_alive(backends: CompiledRepository) -> None:
    """The requests that have not ended when the time is over are cancelled, and their factories send the rest."""
    backends.model("m", "streams", DECOUPLED, io=TEXT_IO)
    server = InferenceServer(backends.options(startup_models=("m",)))
    server.start()
    clients = [ask(server, "wait") for _ in range(3)]
    for client in clients:
        assert texts([client.next()[0]]) == ["waiting"]
    server.stop(0.2)
    assert all(client.error() for client in clients)
