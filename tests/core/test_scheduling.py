"""Queues, batching, instances and their threads (golden 58, 59)."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.metrics.model_metrics import Statistics
from llmbackend.core.scheduling.request_queue import RequestQueue
from llmbackend.core.tensors import Tensor
from llmbackend.frontends.operations.probes import render
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Timer
from tests.helpers.core_host import ECHO_BACKEND, STAGE, Repository, send, serving, version_of, x
from tests.helpers.waiting import eventually

GATED_BACKEND = """
import threading
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ExecutionPolicy, ResponseFlag

POLICY = ExecutionPolicy.BLOCKING

def TRITONBACKEND_Initialize(backend):
    backend.execution_policy = POLICY

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.note(instance.name + ":" + ",".join(request.id for request in requests))
    STAGE.kept.append(threading.current_thread().name)
    STAGE.wait("go")
    for request in requests:
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
"""
QUEUE_POLICY = "max_batch_size: 1\ndynamic_batching { default_queue_policy { POLICY } }"
BATCHING = "max_batch_size: 8\ndynamic_batching { %s }"


def test_a_queue_keeps_no_thread_that_was_dismissed_and_has_ended() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    queue = RequestQueue(QueuePolicies(), Statistics(), Timer())
    queue.dismiss(thread)
    left = weakref.ref(thread)
    del thread
    gc.collect()
    assert left() is None


@pytest.fixture
def gated(repository: Repository) -> Repository:
    repository.backend("gated", GATED_BACKEND)
    return repository


def row(count: int = 1, width: int = 2) -> Tensor:
    return Tensor.of("X", np.zeros((count, width), np.float32))


def test_instances_run_at_once_and_share_one_queue(gated: Repository) -> None:
    gated.model("m", "gated", "instance_group { count: 3 }")
    with serving(gated, "m") as server:
        clients = [send(server, "m", id=str(index)) for index in range(5)]
        eventually(lambda: len(STAGE.events) == 3)
        (statistics,) = [line for line in render(server.metrics_registry).decode().splitlines() if "pending" in line][
            2:
        ]
        assert statistics.endswith(" 2")
        STAGE.open("go")
        for client in clients:
            client.responses()
        assert {event.split(":")[0] for event in STAGE.events[:3]} == {"m_0_0", "m_0_1", "m_0_2"}
        assert set(STAGE.kept) == {"m_0_0", "m_0_1", "m_0_2"}  # a thread of its own for each


def test_one_instance_executes_one_request_at_a_time_in_order(gated: Repository) -> None:
    gated.model("m", "gated")
    with serving(gated, "m") as server:
        clients = [send(server, "m", id=str(index)) for index in range(4)]
        eventually(lambda: STAGE.events)
        assert STAGE.events == ["m_0:0"]
        STAGE.open("go")
        for client in clients:
            client.responses()
        assert STAGE.events == ["m_0:0", "m_0:1", "m_0:2", "m_0:3"]


def test_device_blocking_instances_of_one_device_share_a_thread(
    gated: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBACKEND_GPUS", "0,1")
    source = GATED_BACKEND.replace("ExecutionPolicy.BLOCKING", "ExecutionPolicy.DEVICE_BLOCKING")
    gated.backend("gated", source)
    gated.model("m", "gated", "instance_group { kind: KIND_GPU count: 2 gpus: [0, 1] }")
    STAGE.open("go")
    with serving(gated, "m") as server:
        clients = [send(server, "m", id=str(index)) for index in range(8)]
        for client in clients:
            client.responses()
        assert len(set(STAGE.kept)) <= 2
        assert [(instance.name, instance.device_id) for instance in version_of(server, "m").instances] == [
            ("m_0_0", 0),
            ("m_0_0", 1),
            ("m_0_1", 0),
            ("m_0_1", 1),
        ]


def test_passive_instances_execute_nothing(gated: Repository) -> None:
    gated.model("m", "gated", "instance_group [ { count: 1 }, { count: 1 passive: true } ]")
    STAGE.open("go")
    with serving(gated, "m") as server:
        for index in range(4):
            send(server, "m", id=str(index)).responses()
        assert {event.split(":")[0] for event in STAGE.events} == {"m_0_0"}


def test_a_full_queue_refuses_at_once(gated: Repository) -> None:
    gated.model("m", "gated", "max_batch_size: 1\ndynamic_batching { default_queue_policy { max_queue_size: 1 } }")
    with serving(gated, "m") as server:
        first = send(server, "m", row(), id="1")
        eventually(lambda: STAGE.events)
        second = send(server, "m", row(), id="2")
        with pytest.raises(TritonError) as caught:
            send(server, "m", row(), id="3")
        assert caught.value.status == "Unavailable: [request id: 3] Exceeds maximum queue size"
        STAGE.open("go")
        assert len(first.responses()) == len(second.responses()) == 1
        assert version_of(server, "m").in_flight.count == 0


def test_a_request_that_waited_too_long_is_rejected(gated: Repository) -> None:
    gated.model("m", "gated", QUEUE_POLICY.replace("POLICY", "timeout_action: REJECT allow_timeout_override: true"))
    with serving(gated, "m") as server:
        first = send(server, "m", row(), id="0")
        eventually(lambda: STAGE.events)
        late = send(server, "m", row(), id="late", timeout_us=1)
        STAGE.open("go")
        assert first.responses()[0].error is None
        assert late.error().status == "Unavailable: Request timeout expired"
        text = render(server.metrics_registry).decode()
        assert 'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 1' in text
        assert 'nv_inference_pending_request_count{model="m",version="1"} 0' in text


def test_a_request_that_waited_too_long_is_delayed_behind_the_others(gated: Repository) -> None:
    gated.model("m", "gated", QUEUE_POLICY.replace("POLICY", "timeout_action: DELAY allow_timeout_override: true"))
    with serving(gated, "m") as server:
        clients = [send(server, "m", row(), id="0")]
        eventually(lambda: STAGE.events)
        clients += [send(server, "m", row(), id="late", timeout_us=1), send(server, "m", row(), id="1")]
        STAGE.open("go")
        for client in clients:
            assert client.responses()[0].error is None
        assert STAGE.events == ["m_0:0", "m_0:1", "m_0:late"]


def test_requests_that_wait_for_an_instance_become_one_batch(gated: Repository) -> None:
    gated.model("m", "gated", BATCHING % "")
    with serving(gated, "m") as server:
        clients = [send(server, "m", row(), id="0")]
        eventually(lambda: STAGE.events)
        clients += [send(server, "m", row(2), id=str(index)) for index in range(1, 7)]
        STAGE.open("go")
        for client in clients:
            client.responses()
        assert STAGE.events == ["m_0:0", "m_0:1,2,3,4", "m_0:5,6"]  # at most max_batch_size rows


def test_a_preferred_size_is_sent_without_waiting(gated: Repository) -> None:
    gated.model("m", "gated", BATCHING % "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 60000000")
    STAGE.open("go")
    with serving(gated, "m") as server:
        clients = [send(server, "m", row(), id=str(index)) for index in range(8)]
        for client in clients:
            client.responses()
        assert STAGE.events == ["m_0:0,1,2,3", "m_0:4,5,6,7"]


def test_fewer_than_a_preferred_size_are_sent_after_the_delay(gated: Repository) -> None:
    gated.model("m", "gated", BATCHING % "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000")
    STAGE.open("go")
    with serving(gated, "m") as server:
        assert send(server, "m", row(), id="0").responses()[0].error is None


def test_only_equal_shapes_share_a_batch(gated: Repository) -> None:
    gated.model("m", "gated", BATCHING % "")
    with serving(gated, "m") as server:
        clients = [send(server, "m", row(), id="0")]
        eventually(lambda: STAGE.events)
        widths = [2, 2, 3, 2]
        clients += [send(server, "m", row(1, width), id=f"w{width}") for width in widths]
        STAGE.open("go")
        for client in clients:
            client.responses()
        assert STAGE.events == ["m_0:0", "m_0:w2,w2", "m_0:w3", "m_0:w2"]


def test_a_request_larger_than_every_preferred_size_still_runs(gated: Repository) -> None:
    gated.model("m", "gated", BATCHING % "preferred_batch_size: [ 2 ]")
    STAGE.open("go")
    with serving(gated, "m") as server:
        assert send(server, "m", row(5)).responses()[0].error is None


def test_batch_statistics_show_the_batches(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", BATCHING % "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 60000000")
    with serving(repository, "m") as server:
        clients = [send(server, "m", row()) for _ in range(4)]
        for client in clients:
            assert client.responses()[0].parameters["batch"] == 4
        eventually(lambda: server.model_statistics("m")[0].execution_count == 1)
        (statistics,) = server.model_statistics("m")
        assert (statistics.inference_count, statistics.inference_stats.queue.count) == (4, 4)
        assert statistics.batch_stats[0].batch_size == 4


def test_an_unknown_model_is_refused_before_anything_is_queued(gated: Repository) -> None:
    gated.model("m", "gated")
    with serving(gated, "m") as server:
        with pytest.raises(TritonError) as caught:
            send(server, "m", x(1), x(2))
        assert caught.value.code is ErrorCode.INVALID_ARG
        assert version_of(server, "m").in_flight.count == 0 and STAGE.events == []
