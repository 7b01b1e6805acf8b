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


# Its responses have what a C string or number can not hold, as the input says.
ODD_BACKEND = """
from llmbackend.core.backend_api import ResponseFlag, Tensor, internal

ERRORS = {"nul": "a\\0b", "surrogate": "a\\udc80b"}

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        word = request.inputs["INPUT0"].data.item().decode()
        response = request.new_response()
        response.add_output(Tensor.text("OUTPUT0", word))
        if word == "number":
            response.set_parameter("large", 1 << 64)
        response.send(ResponseFlag.FINAL, internal(ERRORS[word]) if word in ERRORS else None)
        request.release()
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


def test_a_response_that_c_can_not_hold_costs_no_other(
    backends: CompiledRepository, caplog: pytest.LogCaptureFixture
) -> None:
    backends.backend("odd", ODD_BACKEND)
    for name, backend in (("m", "bls"), ("odd", "odd")):
        backends.model(name, backend, io=TEXT_IO)
    with serving(backends, "m", "odd") as server:
        said = [text_of(ask(server, f"infer odd {word}")).strip() for word in ("nul", "surrogate", "number", "well")]
    cut_short, replaced, refused, well = said
    assert (cut_short, replaced, well) == ("odd=error Internal: a.", "odd=error Internal: a?b.", "odd=well by odd1.")
    reason = "the response of model 'odd' cannot be passed to a compiled backend: "
    assert refused.startswith(f"odd=error Internal: {reason}") and reason in caplog.text


def test_inferences_of_many_requests_at_once(server: InferenceServer) -> None:
    clients = [ask(server, "infer stream stream 20") for _ in range(20)]
    wanted = "stream=" + "".join(f"{i} by stream1," for i in range(20)) + "none.\n"
    assert [text_of(client) for client in clients] == [wanted] * 20
