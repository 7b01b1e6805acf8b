"""Implicit state: what the host keeps for a sequence between its requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmbackend.core.backend_api import Request, ResponseFlag, Tensor
from llmbackend.core.config.model_config import parse_text
from llmbackend.core.errors import TritonError
from llmbackend.core.scheduling.sequences.inputs import StateRules
from llmbackend.core.tensors import to_wire
from tests.helpers.core_host import KEEPING_BACKEND, STAGE, Client, Repository, serving
from tests.helpers.sequence_host import NO_IDLENESS, sequences, serving_sequences, step
from tests.helpers.waiting import eventually

# Adds the input's sum to the state and answers with it. An id that ends in "!" sets no state.
SUMMING_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.note(",".join(request.id or "-" for request in requests))
    STAGE.wait("go")
    for request in requests:
        state = request.inputs["STATE_IN"]
        total = state.data + request.inputs["X"].data.sum()
        if not request.id.endswith("!"):
            request.new_state(Tensor.of("STATE_OUT", total)).update()
        response = request.new_response()
        response.add_output(Tensor.of("Y", total))
        response.send(ResponseFlag.FINAL)
        request.release()
"""
STATE = 'state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ] %s } '
X_IS_3 = 3.0  # the sum of the input of `step`


@pytest.fixture
def summing(repository: Repository) -> Repository:
    repository.backend("sum", SUMMING_BACKEND)
    STAGE.open("go")
    return repository


def total(client: Client) -> float:
    (response,) = client.responses()
    assert response.error is None, response.error
    return float(response.outputs[0].data.ravel()[0])


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
@pytest.mark.parametrize("max_batch_size", [0, 4])
def test_a_state_goes_from_request_to_request_of_its_sequence(
    summing: Repository, strategy: str, max_batch_size: int
) -> None:
    summing.model(
        "m", "sum", sequences(f"{NO_IDLENESS} {STATE % ''} {strategy}", max_batch_size, "instance_group { count: 4 }")
    )
    batched = max_batch_size > 0
    with serving_sequences(summing) as server:
        for number in (1, 2):
            assert total(step(server, number, "a", start=True, batched=batched)) == X_IS_3  # states begin as zeros
        assert total(step(server, 1, "b", batched=batched)) == 2 * X_IS_3
        assert total(step(server, 1, "c", batched=batched, end=True)) == 3 * X_IS_3
        assert total(step(server, 2, "b", batched=batched)) == 2 * X_IS_3
        assert total(step(server, 1, "a", batched=batched, start=True)) == X_IS_3


def test_start_begins_a_state_anew_also_without_an_end(summing: Repository) -> None:
    summing.model("m", "sum", sequences(NO_IDLENESS + STATE % ""))
    with serving_sequences(summing) as server:
        assert [total(step(server, 1, id, start=id == "c")) for id in ("c", "b", "c", "b")] == [3, 6, 3, 6]


def test_without_an_update_the_state_stays(summing: Repository) -> None:
    summing.model("m", "sum", sequences(NO_IDLENESS + STATE % ""))
    with serving_sequences(summing) as server:
        assert [total(step(server, 1, id, start=id == "a")) for id in ("a", "b!", "c")] == [3, 6, 6]


def test_null_requests_leave_states_alone(summing: Repository) -> None:
    summing.model("m", "sum", sequences(NO_IDLENESS + STATE % "", 4))
    STAGE.gates.clear()
    with serving_sequences(summing) as server:
        plug = step(server, 9, "plug", start=True, end=True, batched=True)
        eventually(lambda: STAGE.events)
        clients = [step(server, number, f"{number}a", start=True, batched=True) for number in (1, 2)]
        clients += [step(server, 2, "2b", batched=True), step(server, 2, "2c", batched=True)]
        STAGE.open("go")
        plug.responses()
        assert [total(client) for client in clients] == [3, 3, 6, 9]
        assert STAGE.events == ["plug", "1a,2a", "-,2b", "-,2c"]
        assert total(step(server, 1, "1b", batched=True)) == 6


INITIAL = 'initial_state { name: "first" data_type: TYPE_FP32 dims: [ 1 ] %s }'


@pytest.mark.parametrize(("source", "first"), [("zero_data: true", 3.0), ('data_file: "start.bin"', 13.0)])
def test_initial_states_come_from_the_configuration(summing: Repository, source: str, first: float) -> None:
    directory = summing.model("m", "sum", sequences(NO_IDLENESS + STATE % (INITIAL % source)))
    (directory / "initial_state").mkdir()
    (directory / "initial_state" / "start.bin").write_bytes(np.array([10, 99], np.float32).tobytes())  # longer is fine
    with serving_sequences(summing) as server:
        assert total(step(server, 1, "a", start=True, end=True)) == first
        assert total(step(server, 2, "a", start=True, end=True)) == first


def rules(state: str, directory: Path = Path(), max_batch_size: int = 0) -> StateRules:
    config = parse_text(f'name: "m" max_batch_size: {max_batch_size} sequence_batching {{ {state} }}', "test")
    return StateRules.of(config, directory)


def test_states_of_every_kind_begin_in_their_shape(tmp_path: Path) -> None:
    text = Tensor.text("ignored", "one", "two")
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "words").write_bytes(to_wire(text))
    made = rules(
        'state { input_name: "A" output_name: "a" data_type: TYPE_INT64 dims: [ -1, 2 ] } '
        'state { input_name: "B" output_name: "b" data_type: TYPE_STRING dims: [ 2 ] } '
        'state { input_name: "C" output_name: "c" data_type: TYPE_STRING dims: [ -1 ] '
        'initial_state { name: "n" data_type: TYPE_STRING dims: [ 2 ] data_file: "words" } }',
        tmp_path,
        max_batch_size=4,
    ).initial
    assert {name: (tensor.datatype, tensor.shape, tensor.data.ravel().tolist()) for name, tensor in made.items()} == {
        "A": ("INT64", (1, 1, 2), [0, 0]),
        "B": ("BYTES", (1, 2), [b"", b""]),
        "C": ("BYTES", (1, 2), [b"one", b"two"]),
    }


def test_a_state_may_change_its_shape_where_the_configuration_lets_it(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    state = 'state { input_name: "IN" output_name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } '
    repository.model("m", "keep", sequences(NO_IDLENESS + state))
    with serving_sequences(repository) as server:
        for index, expected in enumerate(([0.0], [1.0, 1.0], [2.0, 2.0, 2.0])):
            client = step(server, 1, f"r{index}", start=index == 0)
            request = kept(f"r{index}")
            assert request.inputs["IN"].data.tolist() == expected
            request.new_state(Tensor.of("OUT", np.full(index + 2, index + 1, np.float32))).update()
            finish(request, client)
        del request


def kept(id: str) -> Request:
    STAGE.wait(f"executed {id}")
    ((_, request),) = STAGE.kept
    STAGE.kept.clear()
    assert isinstance(request, Request)
    return request


def finish(request: Request, client: Client) -> None:
    request.new_response().send(ResponseFlag.FINAL)
    request.release()
    client.responses()


def test_a_state_must_be_configured(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep", sequences(NO_IDLENESS + STATE % ""))
    value = np.zeros(1, np.float32)
    with serving_sequences(repository) as server:
        client = step(server, 1, "a", start=True)
        request = kept("a")
        with pytest.raises(TritonError) as caught:
            request.new_state(Tensor.of("undefined_state", value))
        assert caught.value.status == "Invalid argument: state 'undefined_state' is not a valid state name."
        state = request.new_state(Tensor.of("STATE_OUT", value))
        finish(request, client)
        state.update()  # late, but of a sequence that runs
        with pytest.raises(TritonError, match="was released"):
            request.new_state(Tensor.of("STATE_OUT", value))
        del request


def test_a_state_is_a_copy_that_can_not_be_changed(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep", sequences(NO_IDLENESS + STATE % ""))
    with serving_sequences(repository) as server:
        buffer = np.ones(1, np.float32)
        for index, expected in enumerate((0.0, 1.0)):
            client = step(server, 1, f"r{index}", start=index == 0)
            request = kept(f"r{index}")
            given = request.inputs["STATE_IN"].data
            assert given.tolist() == [expected] and not given.flags.writeable
            state = request.new_state(Tensor.of("STATE_OUT", buffer))
            buffer[:] = 5  # a backend uses its memory again
            state.update()
            buffer[:] = 1
            finish(request, client)
        del request


def test_a_model_without_states_has_none(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep", "")
    with serving_sequences(repository) as server:
        client = step(server, 0, "a")
        request = kept("a")
        with pytest.raises(TritonError) as caught:
            request.new_state(Tensor.of("S", np.zeros(1, np.float32)))
        assert caught.value.status == (
            "Invalid argument: unable to add state 'S'. State configuration is missing for model 'm'."
        )
        finish(request, client)
        del request


ONE = 'state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ %s ] %s } '
FIRST = 'initial_state { name: "%s" data_type: TYPE_%s dims: [ %s ] %s } '
ZERO = "zero_data: true"


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (
            ONE % ("1", FIRST % ("n", "FP32", "1", ZERO) * 2),
            "initial_state field for state input 'S' must contain exactly one or zero element. Found '2' elements.",
        ),
        (
            ONE % ("1", FIRST % ("n", "INT32", "1", ZERO)),
            "The data type used for 'initial_state' field of state 'S' does not match the state data type.",
        ),
        (
            ONE % ("1", FIRST % ("", "FP32", "1", ZERO)),
            "Field 'name' must be set when using initial_state for state input 'S'.",
        ),
        (
            ONE % ("1", FIRST % ("n", "FP32", "1, 1", ZERO)),
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 'S'. "
            "2 != 1",
        ),
        (
            ONE % ("-1", FIRST % ("n", "FP32", "-1", ZERO)),
            "'initial_state' field for state input name 'S' contains variable dimensions.",
        ),
        (
            ONE % ("2", FIRST % ("n", "FP32", "3", ZERO)),
            "'initial_state' dim for input name 'S' doesn't match 'state' dim description. 3 != 2",
        ),
        (
            ONE % ("1", FIRST % ("n", "FP32", "1", "")),
            "initial_state setting expects state'S' to have state_data set",
        ),
        (
            ONE % ("4", FIRST % ("n", "FP32", "4", 'data_file: "short"')),
            "initial_state setting expects 16 bytes, but the data provided from shortonly has 2 bytes.",
        ),
        (
            ONE % ("1", FIRST % ("n", "FP32", "1", 'data_file: "../secret"')),
            "'data_file' of state input 'S' must stay inside 'initial_state', got '../secret'",
        ),
        (
            ONE % ("1", FIRST % ("n", "FP32", "1", 'data_file: "none"')),
            "failed to open initial_state file 'none': No such file or directory",
        ),
        (ONE % ("1", "") * 2, "State input name 'S' specified more than once."),
    ],
)
def test_a_state_that_can_not_be_made_is_refused(tmp_path: Path, state: str, error: str) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "short").write_bytes(b"ab")
    with pytest.raises(TritonError) as caught:
        rules(state, tmp_path)
    assert caught.value.status == f"Invalid argument: {error}"


def test_a_model_whose_states_can_not_be_made_does_not_load(summing: Repository) -> None:
    summing.model("m", "sum", sequences(ONE % ("1", FIRST % ("n", "FP32", "1", 'data_file: "none"'))))
    with serving(summing) as server:
        with pytest.raises(TritonError, match="failed to open initial_state file 'none'"):
            server.load_model("m")
        assert server.check() == []
