"""Sequences as python models see them: implicit state and iterative sequences, each model in its own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmbackend.core.backend_api import ErrorCode, RequestFlag
from llmbackend.core.tensors import Tensor
from tests.helpers.python_host import Host

BATCHING = "max_sequence_idle_microseconds: 60000000"
STATES = """
state { input_name: "SIN" output_name: "SOUT" data_type: TYPE_INT32 dims: [ -1 ] }
state { input_name: "WORD_IN" output_name: "WORD" data_type: TYPE_STRING dims: [ 1 ] }
"""
IO = """
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_STRING dims: [ 1 ] }, { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
HEAD = """
import json, numpy as np
import triton_python_backend_utils as pb_utils

def values(request):
    return {tensor.name(): tensor.as_numpy().ravel().tolist() for tensor in request.inputs()}

def text(name, value):
    return pb_utils.Tensor(name, np.array([value.encode()], np.object_))
"""
# Appends X to one state, which grows, and counts in the other; answers with what it was given.
STATEFUL = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = values(request)
            word = given["WORD_IN"][0].decode()
            grown = np.array(given["SIN"] + given["X"], np.int32)
            responses.append(pb_utils.InferenceResponse([
                text("Y", json.dumps([given["SIN"], word])), pb_utils.Tensor("SOUT", grown), text("WORD", word + "x"),
            ]))
        return responses
"""
)
# One response for each of X executions, with what the model sees of the request.
COUNTDOWN = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, arguments):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            sequence = request.correlation_id()
            left = self.left.pop(sequence, None) or values(request)["X"][0]
            response = pb_utils.InferenceResponse([text("Y", json.dumps([sequence, request.flags(), left]))])
            sender = request.get_response_sender()
            if left > 1:
                self.left[sequence] = left - 1
                sender.send(response)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
# Not decoupled: None until the last execution.
PATIENT = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, arguments):
        self.turns = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            sequence = request.correlation_id()
            turn = self.turns.pop(sequence, 0) + 1
            if turn < values(request)["X"][0]:
                self.turns[sequence] = turn
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                responses.append(pb_utils.InferenceResponse([text("Y", str(turn))]))
        return responses
"""
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(Path(tmp_path_factory.mktemp("models")))
    host.load("stateful", config(BATCHING + STATES), STATEFUL)
    host.load("countdown", config(f"{BATCHING} iterative_sequence: true", decoupled=True), COUNTDOWN)
    host.load("patient", config(f"{BATCHING} iterative_sequence: true oldest {{ }}"), PATIENT)
    yield host
    for name in ("stateful", "countdown", "patient"):
        host.server.unload_model(name)
    assert host.server.stop(20)


def config(batching: str, decoupled: bool = False) -> str:
    policy = "model_transaction_policy { decoupled: true }" if decoupled else ""
    return f'backend: "python"\nsequence_batching {{ {batching} }}\n{policy}{IO}'


def x(value: int) -> list[Tensor]:
    return [Tensor.of("X", np.array([value], np.int32))]


def test_a_python_model_sets_states_by_their_output_names(host: Host) -> None:
    for expected_words in ("", "x", "xx"):
        count = len(expected_words)
        flags = RequestFlag.SEQUENCE_START if not count else RequestFlag(0)
        response = host.infer("stateful", x(count), correlation_id=7, flags=flags).one()
        answer = {tensor.name: tensor.data[0].decode() for tensor in response.outputs}
        # A state is for the client only where it is configured as an output, too: WORD is, SOUT is not.
        assert set(answer) == {"Y", "WORD"} and answer["WORD"] == expected_words + "x"
        assert json.loads(answer["Y"]) == [[0, *range(count)], expected_words]
    response = host.infer(
        "stateful", x(9), correlation_id=7, outputs=["Y"], flags=RequestFlag.SEQUENCE_START | RequestFlag.SEQUENCE_END
    ).one()
    ((name, text),) = [(tensor.name, tensor.data[0]) for tensor in response.outputs]
    assert (name, json.loads(text)) == ("Y", [[0], ""])  # START begins the states anew


def test_a_python_model_reschedules_a_request(host: Host) -> None:
    answers = [host.infer("countdown", x(count)) for count in (3, 1, 2)]
    seen = [[json.loads(response.outputs[0].data[0]) for response in answer.all()] for answer in answers]
    assert [[(flags, left) for _, flags, left in each] for each in seen] == [
        [(1, 3), (0, 2), (0, 1)],
        [(1, 1)],
        [(1, 2), (0, 1)],
    ]
    assert len({sequence for each in seen for sequence, _, _ in each}) == 3


def test_a_rescheduled_request_of_a_model_that_is_not_decoupled_has_one_response(host: Host) -> None:
    answers = [host.infer("patient", x(count)) for count in (4, 1, 2)]
    assert [answer.one().outputs[0].data[0] for answer in answers] == [b"4", b"1", b"2"]


def test_a_cancelled_request_is_not_given_to_a_python_model_again(host: Host) -> None:
    answers = host.infer("countdown", x(1_000_000))
    answers.next()
    answers.cancel()
    last = answers.all()[-1]
    assert last.error is not None and last.error.code is ErrorCode.CANCELLED
