"""Sequences of a compiled backend: controls, correlation ids, implicit state (backends/sequences.cpp)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.tensors import Tensor
from tests.helpers.compiled_backends import CompiledRepository
from tests.helpers.core_host import Client, send, serving
from tests.helpers.sequence_host import NO_IDLENESS, flags

IO = """
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
CONTROLS = """
control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } ] }
]
"""
STATE = 'state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ %s ] %s } '
STRATEGIES = ("direct { }", "oldest { max_candidate_sequences: 8 }")


@contextmanager
def serving_sums(
    backends: CompiledRepository, strategy: str, batch: int = 0, state: str = STATE % ("1", ""), id_type: str = "UINT64"
) -> Iterator[InferenceServer]:
    config = f"{NO_IDLENESS} {CONTROLS % id_type} {state} {strategy}"
    model = backends.model("m", "sequences", f"max_batch_size: {batch} sequence_batching {{ {config} }}", io=IO)
    (model / "initial_state").mkdir()
    (model / "initial_state" / "start.bin").write_bytes(np.float32(40).tobytes())
    with serving(backends, "m") as server:
        try:
            yield server
        finally:
            server.unload_model("m")


def add(
    server: InferenceServer,
    sequence: int | str,
    value: float,
    *,
    start: bool = False,
    end: bool = False,
    batch: int = 0,
) -> Client:
    data = np.full((1, 1) if batch else (1,), value, np.float32)
    return send(server, "m", Tensor.of("INPUT0", data), correlation_id=sequence, flags=flags(start, end))


def shown(client: Client) -> dict[str, str]:
    (response,) = client.responses()
    assert response.error is None, response.error
    lines = response.outputs[0].data.item().decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("batch", [0, 4])
def test_interleaved_sequences_keep_their_sums(backends: CompiledRepository, strategy: str, batch: int) -> None:
    """Requests of 12 sequences in a random order, each in its own: more sequences than slots, so some wait for others
    to end."""
    random = Random(7)
    values = {sequence: [random.randrange(1, 100) for _ in range(6)] for sequence in range(1, 13)}
    order = [sequence for sequence in values for _ in range(6)]
    random.shuffle(order)
    sent: dict[int, list[Client]] = {sequence: [] for sequence in values}
    with serving_sums(backends, strategy, batch) as server:
        for sequence in order:
            step = len(sent[sequence])
            sent[sequence].append(
                add(server, sequence, values[sequence][step], start=step == 0, end=step == 5, batch=batch)
            )
        for sequence, clients in sent.items():
            answers = [shown(client) for client in clients]
            assert [int(answer["sum"]) for answer in answers] == np.cumsum(values[sequence]).tolist()
            assert [answer["start"] + answer["end"] + answer["flags"] for answer in answers] == [
                "101", "000", "000", "000", "000", "012",
            ]  # fmt: skip
            assert {(answer["id"], answer["ID"]) for answer in answers} == {(str(sequence), str(sequence))}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sequence_may_be_named_by_a_text(backends: CompiledRepository, strategy: str) -> None:
    with serving_sums(backends, strategy, 4, id_type="STRING") as server:
        assert shown(add(server, "fünf", 1, start=True, batch=4))["id"] == "'fünf'"
        assert shown(add(server, "other", 5, start=True, end=True, batch=4))["sum"] == "5"
        last = shown(add(server, "fünf", 2, end=True, batch=4))
        assert (last["sum"], last["ID"], last["end"]) == ("3", "fünf", "1")


@pytest.mark.parametrize(("source", "first"), [("zero_data: true", 1), ('data_file: "start.bin"', 41)])
def test_an_initial_state(backends: CompiledRepository, source: str, first: int) -> None:
    initial = f'initial_state {{ name: "s" data_type: TYPE_FP32 dims: [ 1 ] {source} }}'
    with serving_sums(backends, STRATEGIES[0], 4, STATE % ("1", initial)) as server:
        for sequence in (1, 2):
            assert shown(add(server, sequence, 1, start=True, batch=4))["sum"] == str(first)
        assert shown(add(server, 1, 1, end=True, batch=4))["sum"] == str(first + 1)
        assert shown(add(server, 1, 1, start=True, batch=4))["sum"] == str(first)  # END has dropped the state


def test_a_state_may_grow(backends: CompiledRepository) -> None:
    with serving_sums(backends, STRATEGIES[1], state=STATE % ("-1", "")) as server:
        answers = [shown(add(server, 1, value, start=step == 0)) for step, value in enumerate((-3, -3, 1))]
        assert [(answer["sum"], answer["elements"]) for answer in answers] == [("3", "1"), ("6", "2"), ("7", "3")]


def test_without_an_update_the_state_stays(backends: CompiledRepository) -> None:
    with serving_sums(backends, STRATEGIES[0]) as server:
        assert [shown(add(server, 1, value, start=value == 5))["sum"] for value in (5, -2, 1)] == ["5", "7", "6"]


def test_wrong_calls(backends: CompiledRepository) -> None:
    with serving_sums(backends, STRATEGIES[0]) as server:
        assert shown(add(server, 1, 5, start=True))["sum"] == "5"
        assert shown(add(server, 1, -1)) == {
            "StateNew X": "Invalid argument: state 'X' is not a valid state name.",
            "StateNew by its input's name": "Invalid argument: state 'STATE_IN' is not a valid state name.",
            "StateNew": "OK",
            "Update without a buffer": "Invalid argument: state 'STATE_OUT' has no data: TRITONBACKEND_StateBuffer was "
            "not called, or it was updated before",
            "Buffer, asked of a GPU": "0",
            "Buffer again": "OK",
            "Update with 3 bytes for [1]": "Invalid argument: input byte size mismatch for input 'STATE_OUT'. "
            "Expected 4, got 3",
            "Release to be rescheduled": "Invalid argument: Request is released with "
            "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle such a flag.",
        }
        assert shown(add(server, 1, 1))["sum"] == "6"
