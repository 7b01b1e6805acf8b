"""Which requests share a batch, when it is sent, and in which order answers come (golden 59)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.backend_api import RequestFlag, ResponseFlag
from llmbackend.core.config.model_config import parse_text, set_defaults
from llmbackend.core.config.model_config_rules import validate_config
from llmbackend.core.errors import ErrorCode, TritonError, internal
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.metrics.model_metrics import FailureReason, Statistics
from llmbackend.core.requests.queued_request import QueuedRequest
from llmbackend.core.requests.request_validation import ValidRequest
from llmbackend.core.requests.response_channel import Reaper, ResponseChannel
from llmbackend.core.scheduling.dynamic_batcher import DynamicBatcher
from llmbackend.core.scheduling.request_queue import RequestQueue
from llmbackend.core.scheduling.scheduler import ResponseOrder
from llmbackend.core.tensors import Tensor
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Timer
from tests.helpers.core_host import ECHO_BACKEND, KEEPING_BACKEND, STAGE, Client, Repository, send, serving, version_of
from tests.helpers.waiting import eventually

# Notes each batch, and executes one whose first request is called X when the test opens the gate "X".
STEPPED_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, internal

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.note(",".join(request.id for request in requests))
    STAGE.wait(requests[0].id)
    for request in requests:
        error = internal("no") if request.id.startswith("bad") else None
        request.new_response().send(ResponseFlag.FINAL, error)
        request.release()
"""
BATCHING = "max_batch_size: 8\ndynamic_batching { %s }"
RAGGED_IO = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
OPTIONAL_IO = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "Z" data_type: TYPE_FP32 dims: [ 2 ] optional: true } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def tensor(name: str = "X", rows: int = 1, width: int = 2) -> Tensor:
    return Tensor.of(name, np.zeros((rows, width), np.float32))


@pytest.fixture
def stepped(repository: Repository) -> Repository:
    repository.backend("stepped", STEPPED_BACKEND)
    return repository


def send_behind_a_busy_instance(stepped: Repository, config: str, io: str, requests: dict[str, list[Tensor]]) -> None:
    """Sends while the only instance executes "0", then lets everything run."""
    stepped.model("m", "stepped", config, io=io)
    with serving(stepped, "m") as server:
        clients = [send(server, "m", tensor(), id="0")]
        eventually(lambda: STAGE.events)
        clients += [send(server, "m", *tensors, id=name) for name, tensors in requests.items()]
        for name in ("0", *requests):
            STAGE.open(name)
        for client in clients:
            assert client.responses()[0].error is None


def test_ragged_inputs_of_any_shape_share_a_batch(stepped: Repository) -> None:
    widths = {f"w{width}": [tensor(width=width)] for width in (1, 5, 3)}
    send_behind_a_busy_instance(stepped, BATCHING % "", RAGGED_IO, widths)
    assert STAGE.events == ["0", "w1,w5,w3"]


def test_requests_with_another_set_of_optional_inputs_do_not_share_a_batch(stepped: Repository) -> None:
    both = [tensor(), tensor("Z")]
    requests = {"a": [tensor()], "b": [tensor()], "c": both, "d": both, "e": [tensor()]}
    send_behind_a_busy_instance(stepped, BATCHING % "", OPTIONAL_IO, requests)
    assert STAGE.events == ["0", "a,b", "c,d", "e"]


def test_golden_59_six_requests_make_a_batch_of_four_and_one_of_two(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", BATCHING % "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 300000")
    with serving(repository, "m") as server:
        clients = [send(server, "m", tensor()) for _ in range(6)]
        assert [client.responses()[0].parameters["batch"] for client in clients] == [4, 4, 4, 4, 2, 2]
        eventually(lambda: server.model_statistics("m")[0].execution_count == 2)
        (statistics,) = server.model_statistics("m")
        batches = [(batch.batch_size, batch.compute_infer.count) for batch in statistics.batch_stats]
        assert statistics.inference_count == 6 and batches == [(2, 1), (4, 1)]


def test_after_the_delay_a_batch_may_be_larger_than_every_preferred_size(stepped: Repository) -> None:
    config = BATCHING % "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000"
    stepped.model("m", "stepped", config)
    with serving(stepped, "m") as server:
        clients = [send(server, "m", tensor(), id="0")]
        eventually(lambda: STAGE.events)
        clients += [send(server, "m", tensor(), id=str(index)) for index in range(1, 7)]
        time.sleep(0.01)  # longer than the delay
        for gate in ("0", "1"):
            STAGE.open(gate)
        for client in clients:
            client.responses()
        assert STAGE.events == ["0", "1,2,3,4,5,6"]


@pytest.mark.parametrize("action", ["REJECT", "DELAY"])
def test_a_request_that_expires_makes_way_for_a_preferred_size_at_once(stepped: Repository, action: str) -> None:
    """The rest does not wait for the delay, which would take an hour."""
    policy = f"default_queue_policy {{ timeout_action: {action} allow_timeout_override: true }}"
    settings = f"preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 3600000000 {policy}"
    stepped.model("m", "stepped", BATCHING % settings)
    STAGE.open("full")
    with serving(stepped, "m") as server:
        early = send(server, "m", tensor(), id="early", timeout_us=300_000)
        full = send(server, "m", tensor(rows=4), id="full")
        full.next()
        assert STAGE.events == ["full"]
        if action == "DELAY":
            early.cancel()
        assert early.error().message == ("Request cancelled" if action == "DELAY" else "Request timeout expired")


def test_a_request_that_is_cancelled_makes_way_for_a_preferred_size_at_once(stepped: Repository) -> None:
    stepped.model("m", "stepped", BATCHING % "preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 3600000000")
    STAGE.open("full")
    with serving(stepped, "m") as server:
        early, full = send(server, "m", tensor(), id="early"), send(server, "m", tensor(rows=4), id="full")
        early.cancel()
        full.next()
        assert STAGE.events == ["full"] and early.error().code is ErrorCode.CANCELLED


def test_without_a_delay_the_best_preferred_size_is_taken(stepped: Repository) -> None:
    requests = {str(index): [tensor()] for index in range(1, 7)}
    config = BATCHING % "preferred_batch_size: [ 2, 4 ]"
    send_behind_a_busy_instance(stepped, config, RAGGED_IO, requests)
    assert STAGE.events == ["0", "1,2,3,4", "5,6"]


# --- the rule itself, against Triton's algorithm written down plainly ------------------------------------------------


class Owner:
    name = "m"
    version = 1
    reaper = Reaper()
    statistics = Statistics()
    may_block_in_send = False

    def request_done(self, channel: ResponseChannel) -> None: ...


def queued(batcher: DynamicBatcher, rows: int, width: int) -> None:
    message = InferenceRequest("m")
    inputs = {"X": tensor(rows=rows, width=width)}
    channel = ResponseChannel(message, lambda response, flags: None, Owner())
    batcher.enqueue(QueuedRequest(message, ValidRequest(inputs, ("Y",), rows), channel))


def batch_of_triton(rows: list[int], widths: list[int], preferred: set[int], most: int, is_late: bool) -> int:
    """GetDynamicBatch of dynamic_batch_scheduler.cc for an empty payload; 0 = wait."""
    pending = best = best_count = count = 0
    send_now = False
    for size, width in zip(rows, widths, strict=True):
        if count:
            if pending + size > max(preferred) and best == 0:
                best, best_count = pending, count
            if pending + size > most or width != widths[0]:
                send_now = True
                break
        pending += size
        count += 1
        if pending in preferred:
            best, best_count = pending, count
    if best and not is_late:
        return best_count
    return count if send_now or pending >= max(preferred) or is_late else 0


@given(
    requests=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 1, 2])), min_size=1, max_size=12),
    preferred=st.sets(st.integers(1, 8), min_size=1, max_size=3),
    is_late=st.booleans(),
)
def test_batches_are_those_of_tritons_algorithm(
    requests: list[tuple[int, int]], preferred: set[int], is_late: bool
) -> None:
    config = ModelConfig(max_batch_size=8)
    config.input.add(name="X", dims=[-1])
    config.dynamic_batching.preferred_batch_size.extend(preferred)
    config.dynamic_batching.max_queue_delay_microseconds = 1 if is_late else 60_000_000
    batcher = DynamicBatcher(config, Statistics(), Timer())
    for rows, width in requests:
        queued(batcher, rows, width)
    if is_late:
        time.sleep(2e-6)
    batch = batcher.take_batch()
    all_rows, widths = [rows for rows, _ in requests], [width for _, width in requests]
    assert len(batch) == batch_of_triton(all_rows, widths, preferred, 8, is_late)
    for request in (*batch, *batcher._queue):
        request.fail(internal("the example is over"), FailureReason.OTHER)


# --- preserve_ordering ----------------------------------------------------------------------------------------------

ORDERED = "max_batch_size: 1\ninstance_group { count: 3 }\ndynamic_batching { preserve_ordering: true %s }"


class Arrivals:
    """Clients that note the order in which their answers come."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.clients: dict[str, Client] = {}

    def send(self, server: InferenceServer, name: str, **fields: Any) -> None:
        client = self.clients[name] = Client()

        def noted(response: InferenceResponse | None, flags: ResponseFlag) -> None:
            self.order.append(name)
            client(response, flags)

        message = InferenceRequest("m", id=name, inputs=(tensor(),), **fields)
        client.handle = server.infer_async(message, noted)


def test_answers_come_in_the_order_of_their_requests(stepped: Repository) -> None:
    stepped.model("m", "stepped", ORDERED % "")
    arrivals = Arrivals()
    with serving(stepped, "m") as server:
        for name in ("a", "bad", "c"):
            arrivals.send(server, name)
        eventually(lambda: len(STAGE.events) == 3)  # three instances execute at once
        for name in ("c", "bad"):
            STAGE.open(name)
        eventually(lambda: version_of(server, "m").in_flight.count == 1)  # both have ended, and wait for "a"
        assert arrivals.order == []
        STAGE.open("a")
        assert arrivals.clients["c"].responses()[0].error is None
        assert arrivals.order == ["a", "bad", "c"]
        assert arrivals.clients["bad"].error().message == "no"


def test_a_request_that_is_refused_in_the_queue_does_not_wait(stepped: Repository) -> None:
    policy = "default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 60000000 }"
    stepped.model("m", "stepped", (ORDERED % policy).replace("count: 3", "count: 1"))
    arrivals = Arrivals()
    with serving(stepped, "m") as server:
        arrivals.send(server, "a")
        eventually(lambda: STAGE.events)
        arrivals.send(server, "late", timeout_us=1)
        arrivals.send(server, "gone")
        arrivals.send(server, "b")
        assert arrivals.clients["late"].error().message == "Request timeout expired"
        handle = arrivals.clients["gone"].handle
        assert handle is not None
        handle.cancel()
        assert arrivals.clients["gone"].error().code is ErrorCode.CANCELLED
        for name in ("b", "a"):
            STAGE.open(name)
        arrivals.clients["b"].responses()
        assert arrivals.order == ["late", "gone", "a", "b"]


@pytest.mark.parametrize(
    "config",
    [
        "max_batch_size: 4\ndynamic_batching { preserve_ordering: true }",
        "max_batch_size: 4\nsequence_batching { oldest { max_candidate_sequences: 4 preserve_ordering: true } }",
    ],
)
def test_a_backend_that_answers_out_of_turn_is_put_in_order(repository: Repository, config: str) -> None:
    repository.backend("keeping", KEEPING_BACKEND)
    repository.model("m", "keeping", config)
    arrivals = Arrivals()
    flags = RequestFlag.SEQUENCE_START | RequestFlag.SEQUENCE_END
    with serving(repository, "m") as server:
        for number, name in enumerate(("a", "b", "c"), 1):
            arrivals.send(server, name, correlation_id=number, flags=flags)
        eventually(lambda: len(STAGE.kept) == 3)
        for _, request in reversed(STAGE.kept):
            request.new_response().send(ResponseFlag.FINAL)
            request.release()
        STAGE.kept.clear()
        arrivals.clients["c"].responses()
        assert arrivals.order == ["a", "b", "c"]


def test_without_preserve_ordering_the_faster_answer_comes_first(stepped: Repository) -> None:
    stepped.model("m", "stepped", ORDERED.replace("preserve_ordering: true", "") % "")
    arrivals = Arrivals()
    with serving(stepped, "m") as server:
        for name in ("a", "b"):
            arrivals.send(server, name)
        eventually(lambda: len(STAGE.events) == 2)
        STAGE.open("b")
        arrivals.clients["b"].responses()
        STAGE.open("a")
        arrivals.clients["a"].responses()
        assert arrivals.order == ["b", "a"]


def test_a_request_that_was_refused_at_once_leaves_no_place_in_the_line(stepped: Repository) -> None:
    policy = "default_queue_policy { max_queue_size: 1 }"
    stepped.model("m", "stepped", (ORDERED % policy).replace("count: 3", "count: 1"))
    arrivals = Arrivals()
    with serving(stepped, "m") as server:
        arrivals.send(server, "a")
        eventually(lambda: STAGE.events)
        arrivals.send(server, "b")
        with pytest.raises(TritonError, match="Exceeds maximum queue size"):
            arrivals.send(server, "c")
        for name in ("b", "a"):
            STAGE.open(name)
        assert [arrivals.clients[name].responses()[0].error for name in ("a", "b")] == [None, None]


@given(
    st.lists(
        st.tuples(st.sampled_from(["enqueue", "enqueue", "take", "finish", "cancel"]), st.integers(0, 9)), max_size=40
    )
)
def test_answers_are_passed_on_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    order = ResponseOrder(RequestQueue(QueuePolicies(), Statistics(), Timer()))
    source = order.source()
    answered: list[tuple[int, bool]] = []
    channels: list[ResponseChannel] = []
    running: list[QueuedRequest] = []

    def enqueue() -> None:
        number = len(channels)
        message = InferenceRequest("m")

        def noted(response: InferenceResponse | None, flags: ResponseFlag) -> None:
            answered.append((number, response is not None and response.error is None))

        channels.append(ResponseChannel(message, noted, Owner()))
        order.enqueue(QueuedRequest(message, ValidRequest({"X": tensor()}, ("Y",), 1), channels[-1]))

    def finish(index: int) -> None:
        request = running.pop(index % len(running))
        request.new_response().send(ResponseFlag.FINAL)
        request.release()

    for step, number in steps:
        if step == "enqueue":
            enqueue()
        elif step == "take":
            running += source.take_batch()
        elif step == "finish" and running:
            finish(number)
        elif step == "cancel" and channels:
            channels[number % len(channels)].cancel()
    while batch := source.take_batch():
        running += batch
    while running:
        finish(-1)
    assert sorted(number for number, _ in answered) == list(range(len(channels)))
    served = [number for number, is_answer in answered if is_answer]
    assert served == sorted(served)
    assert not any(order.leaked_resources().values())


# --- what whole batches need of the configuration --------------------------------------------------------------------

BATCH_INPUT = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 source_input: "X" }'
BATCH_OUTPUT = 'batch_output { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({'source_input: "X" }': "}"}, "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m"),
        ({"TYPE_INT32": "TYPE_INT64"}, "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
        ({'source_input: "X" }': 'source_input: "Q" }'}, "unknown source input name 'Q' for m"),
        ({'target_name: "Y"': 'target_name: "Q"'}, "unknown target output name 'Q' for m"),
        ({'target_name: "Y"': 'target_name: ["Y", "Y"]'}, "target output name 'Y' can only be specified once for m"),
        ({"allow_ragged_batch": "is_shape_tensor"}, "shape tensors are only supported for TensorRT platform for m"),
    ],
)
def test_broken_batch_inputs_and_outputs_are_refused_in_tritons_words(change: dict[str, str], message: str) -> None:
    text = f'name: "m" backend: "b" max_batch_size: 4 {RAGGED_IO} {BATCH_INPUT} {BATCH_OUTPUT}'
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    config = parse_text(text, "test")
    set_defaults(config)
    if not message:
        return validate_config(config)
    with pytest.raises(TritonError) as caught:
        validate_config(config)
    assert caught.value.status == f"Invalid argument: {message}"
