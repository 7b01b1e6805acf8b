"""Iterative sequences: a backend releases a request with RESCHEDULE and gets it again."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from llmbackend.core.backend_api import ReleaseFlag, Request, RequestFlag, ResponseFlag
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.tensors import Tensor
from tests.helpers.core_host import KEEPING_BACKEND, STAGE, Client, Repository, send, version_of
from tests.helpers.sequence_host import CONTROLS, NO_IDLENESS, sequences, serving_sequences, step
from tests.helpers.waiting import eventually

# The input says how many responses are wanted; each execution sends one, with how many are left, and reschedules.
COUNTDOWN_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ReleaseFlag, ResponseFlag, Tensor
import numpy as np

LEFT = {}

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.note(instance.name + ":" + ",".join(request.id or "-" for request in requests))
    STAGE.wait("go")
    instance.report_batch_statistics(len(requests), 1, 2, 3, 4)
    for request in requests:
        instance.report_statistics(request, True, 1, 2, 3, 4)
        if not request.id:  # a null request
            request.new_response().send(ResponseFlag.FINAL)
            request.release()
            continue
        STAGE.kept.append((request.id, {
            name: tensor.data.ravel().tolist()[0] for name, tensor in request.inputs.items() if name != "X"
        }))
        left = LEFT.pop(request.id, int(request.inputs["X"].data.ravel()[0])) - 1
        response = request.new_response()
        response.add_output(Tensor.of("Y", np.array([left], np.float32)))
        response.send(ResponseFlag.NONE if left else ResponseFlag.FINAL)
        if left:
            LEFT[request.id] = left
            request.release(ReleaseFlag.RESCHEDULE)
        else:
            request.release()
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
ITERATIVE = "iterative_sequence: true " + NO_IDLENESS


@pytest.fixture
def counting(repository: Repository) -> Repository:
    repository.backend("count", COUNTDOWN_BACKEND)
    repository.backend("keep", KEEPING_BACKEND)
    STAGE.open("go")
    return repository


def count_down(server: InferenceServer, count: int, id: str, batched: bool = True, **fields: Any) -> Client:
    shape = (1, 1) if batched else (1,)
    return send(server, "m", Tensor.of("X", np.full(shape, count, np.float32)), id=id, **fields)


def answers(client: Client) -> list[float]:
    return [response.outputs[0].data[0] for response in client.responses()]


def kept(id: str) -> Request:
    STAGE.wait(f"executed {id}")
    STAGE.gates.clear()
    ((_, request),) = STAGE.kept
    STAGE.kept.clear()
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize("strategy", ["", "direct { }", "oldest { max_candidate_sequences: 2 }"])
def test_a_rescheduled_request_is_executed_until_it_is_released(counting: Repository, strategy: str) -> None:
    counting.model("m", "count", sequences(f"{ITERATIVE} {strategy}", 2, DECOUPLED))
    with serving_sequences(counting) as server:
        clients = [count_down(server, count, f"r{count}") for count in (3, 1, 4, 2)]  # more than there are slots
        assert [answers(client) for client in clients] == [[2, 1, 0], [0], [3, 2, 1, 0], [1, 0]]


def test_one_request_is_a_sequence_with_start_and_without_an_id(counting: Repository) -> None:
    counting.model("m", "count", sequences(ITERATIVE + CONTROLS, 0, DECOUPLED))
    with serving_sequences(counting) as server:
        assert answers(count_down(server, 3, "a", batched=False)) == [2, 1, 0]
        assert answers(count_down(server, 1, "b", batched=False)) == [0]
        assert [(id, entry["START"], entry["END"], entry["CORRID"]) for id, entry in STAGE.kept] == [
            ("a", 1, False, 1),
            ("a", 0, False, 1),
            ("a", 0, False, 1),
            ("b", 1, False, 2),
        ]


def test_running_requests_share_batches_with_new_ones(counting: Repository) -> None:
    """Continuous batching: a request that comes while another runs is in the next batch with it."""
    counting.model("m", "count", sequences(f"{ITERATIVE} oldest {{ max_candidate_sequences: 8 }}", 4, DECOUPLED))
    STAGE.gates.clear()
    with serving_sequences(counting) as server:
        clients = [count_down(server, 3, "a")]
        eventually(lambda: STAGE.events)
        clients += [count_down(server, 2, "b"), count_down(server, 1, "c")]
        STAGE.open("go")
        for client in clients:
            client.responses()
        assert STAGE.events == ["m_0:a", "m_0:b,c,a", "m_0:b,a"]


def test_a_sequence_of_the_host_never_meets_a_clients(counting: Repository) -> None:
    counting.model("m", "count", sequences(ITERATIVE, 2, DECOUPLED))
    with serving_sequences(counting) as server:
        own = count_down(server, 50, "own", correlation_id=1, flags=RequestFlag.SEQUENCE_START)
        hosts = count_down(server, 50, "hosts")  # gets the id 1, too
        assert len(answers(own)) == len(answers(hosts)) == 50


def test_each_execution_is_counted(counting: Repository) -> None:
    counting.model("m", "count", sequences(ITERATIVE, 0, DECOUPLED))
    with serving_sequences(counting) as server:
        assert len(answers(count_down(server, 3, "a", batched=False))) == 3
        eventually(lambda: server.model_statistics("m")[0].execution_count == 3)
        (statistics,) = server.model_statistics("m")
        assert (statistics.inference_count, statistics.inference_stats.success.count) == (3, 3)
        assert version_of(server, "m").statistics.pending_count == 0


@pytest.mark.parametrize(
    "config",
    [
        "max_batch_size: 4\ndynamic_batching { }",
        sequences(NO_IDLENESS + "direct { }"),
        sequences(NO_IDLENESS + "oldest { }"),
        "",
    ],
)
def test_only_iterative_sequences_can_be_rescheduled(counting: Repository, config: str) -> None:
    counting.model("m", "keep", f"{config}\n{DECOUPLED}")
    with serving_sequences(counting) as server:
        client = step(server, 1, "a", start=True, end=True, batched="max_batch_size: 4" in config)
        request = kept("a")
        with pytest.raises(TritonError) as caught:
            request.release(ReleaseFlag.RESCHEDULE)
        assert caught.value.status == (
            "Invalid argument: Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is "
            "not configured to handle such a flag."
        )
        request.new_response().send(ResponseFlag.FINAL)  # it stayed with the backend
        request.release()
        assert client.responses()[0].error is None


def test_a_request_that_was_idle_for_too_long_can_not_be_rescheduled(counting: Repository) -> None:
    counting.model(
        "m", "keep", sequences("iterative_sequence: true max_sequence_idle_microseconds: 20000", 0, DECOUPLED)
    )
    with serving_sequences(counting) as server:
        client = count_down(server, 1, "a", batched=False)
        request = kept("a")
        batcher = version_of(server, "m").sequences
        assert batcher is not None
        eventually(lambda: batcher.open_count == 0)
        with pytest.raises(TritonError, match="must specify the START flag on the first request of the sequence"):
            request.release(ReleaseFlag.RESCHEDULE)
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
        assert client.responses()[0].error is None


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_a_cancelled_request_is_not_executed_again(counting: Repository, strategy: str) -> None:
    counting.model("m", "keep", sequences(f"{ITERATIVE} {strategy}", 0, DECOUPLED))
    with serving_sequences(counting) as server:
        client = count_down(server, 1, "a", batched=False)
        request = kept("a")
        client.cancel()
        assert request.is_cancelled
        request.release(ReleaseFlag.RESCHEDULE)
        del request
        assert client.error().code is ErrorCode.CANCELLED
        assert not STAGE.gates["executed a"].is_set()
        again = count_down(server, 1, "b", batched=False)  # the slot is free
        other = kept("b")
        other.new_response().send(ResponseFlag.FINAL)
        other.release()
        again.responses()


def test_a_reschedule_drops_the_callbacks_for_a_cancellation(counting: Repository) -> None:
    counting.model("m", "keep", sequences(ITERATIVE, 0, DECOUPLED))
    called: list[int] = []
    with serving_sequences(counting) as server:
        client = count_down(server, 1, "a", batched=False)
        for turn in range(3):
            request = kept("a")
            request.on_cancel(partial(called.append, turn))
            if turn < 2:
                request.release(ReleaseFlag.RESCHEDULE)
                del request
        client.cancel()
        assert called == [2]
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
        client.responses()


def test_a_response_may_come_before_the_reschedule(counting: Repository) -> None:
    """FINAL ends the request for its client; the backend may still take another turn with it."""
    counting.model("m", "keep", sequences(ITERATIVE, 0, DECOUPLED))
    with serving_sequences(counting) as server:
        client = count_down(server, 1, "a", batched=False)
        request = kept("a")
        request.new_response().send(ResponseFlag.FINAL)
        client.responses()
        request.release(ReleaseFlag.RESCHEDULE)
        del request
        kept("a").release()
