"""Inferences that a compiled backend makes on other models: TRITONSERVER_ServerInferAsync and what belongs to it.

What the functions of a request and of the server must give is in bls.txt, by command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmbackend.core.inference_server import InferenceServer
from tests.helpers.compiled_backends import DECOUPLED, TEXT_IO, CompiledRepository, ask, text_of
from tests.helpers.core_host import serving

EXPECTED = dict(
    re.findall(r"^# (.+?)\n(.*?)\n\n", Path(__file__).with_name("bls.txt").read_text(), re.DOTALL | re.MULTILINE)
)
SEQUENCES = """
sequence_batching { control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] }
] }
"""


REFUSED_AT_ONCE = "request other"
"""The errors of ServerInferAsync itself; where the instance has its own process, they come as responses."""


@contextmanager
def serving_models(backends: CompiledRepository) -> Iterator[InferenceServer]:
    for name, backend, config in (
        ("m", "bls", ""),
        ("n", "bls", ""),
        ("other", "scripted", ""),
        ("full", "scripted", ""),
        ("stream", "scripted", DECOUPLED),
        ("steps", "scripted", SEQUENCES),
    ):
        backends.model(name, backend, config, io=TEXT_IO)
    with serving(backends, "m", "n", "other", "full", "stream", "steps") as server:
        yield server


@pytest.fixture
def server(backends: CompiledRepository) -> Iterator[InferenceServer]:
    with serving_models(backends) as server:
        yield server


def test_the_functions_of_a_request(inside: CompiledRepository) -> None:
    with serving_models(inside) as server:
        assert text_of(ask(server, REFUSED_AT_ONCE)).splitlines() == EXPECTED[REFUSED_AT_ONCE].splitlines()


def test_commands(server: InferenceServer) -> None:
    for command, expected in EXPECTED.items():
        if command != REFUSED_AT_ONCE:
            assert text_of(ask(server, command)).splitlines() == expected.splitlines(), command


def test_an_inference_in_flight_can_be_cancelled(server: InferenceServer) -> None:
    assert text_of(ask(server, "cancel stream stream 1000000000")).splitlines() == [
        "Cancel before=OK",
        "IsCancelled=false",
        "Cancel=OK",
        "last=error Cancelled: stopped.",
    ]


def test_inferences_of_many_requests_at_once(server: InferenceServer) -> None:
    clients = [ask(server, "infer stream stream 20") for _ in range(20)]
    wanted = "stream=" + "".join(f"{i} by stream1," for i in range(20)) + "none.\n"
    assert [text_of(client) for client in clients] == [wanted] * 20
