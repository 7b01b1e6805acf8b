"""Priorities, timeouts and bounds of queues (golden 58)."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.metrics.model_metrics import Statistics
from llmbackend.core.requests.queued_request import QueuedRequest
from llmbackend.core.requests.request_validation import ValidRequest
from llmbackend.core.requests.response_channel import Reaper, ResponseChannel
from llmbackend.core.scheduling.request_queue import PriorityQueue
from llmbackend.core.tensors import Tensor
from llmbackend.waiting.queue_policy import QueuePolicies, QueuePolicy
from llmbackend.waiting.timer import Timer
from tests.helpers.core_host import ECHO_BACKEND, STAGE, Client, Repository, send, serving, version_of, x
from tests.helpers.waiting import eventually

BUSY_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.note(",".join(f"{request.id}@{request.priority}" for request in requests))
    STAGE.wait("go")
    for request in requests:
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
"""
THREE_LEVELS = "priority_levels: 3 default_priority_level: 2"
FOREVER = 2**64 - 1


@pytest.fixture
def busy(repository: Repository) -> Repository:
    repository.backend("busy", BUSY_BACKEND)
    return repository


def batching(fields: str, max_batch_size: int = 1) -> str:
    return f"max_batch_size: {max_batch_size}\ndynamic_batching {{ {fields} }}"


def row(width: int = 2) -> Tensor:
    return Tensor.of("X", np.zeros((1, width), np.float32))


@pytest.mark.parametrize("max_batch_size", [0, 1, 2])
def test_the_higher_priority_is_served_first(busy: Repository, max_batch_size: int) -> None:
    busy.model("m", "busy", batching(THREE_LEVELS, max_batch_size))
    tensor = row() if max_batch_size else x(1)
    with serving(busy, "m") as server:
        clients = [send(server, "m", tensor, id="first")]
        eventually(lambda: STAGE.events)
        order = {"low": 3, "default": 0, "unknown": 99, "high": 1, "middle": 2, "high2": 1}
        clients += [send(server, "m", tensor, id=name, priority=level) for name, level in order.items()]
        STAGE.open("go")
        for client in clients:
            assert client.responses()[0].error is None
        served = ",".join(STAGE.events).split(",")
        assert served == ["first@2", "high@1", "high2@1", "default@2", "unknown@2", "middle@2", "low@3"]


def test_without_levels_the_priority_is_the_backends_business(busy: Repository) -> None:
    busy.model("m", "busy")
    STAGE.open("go")
    with serving(busy, "m") as server:
        send(server, "m", id="a", priority=7).responses()
        assert STAGE.events == ["a@7"]


def test_each_level_has_its_own_policy(busy: Repository) -> None:
    policies = "default_queue_policy { max_queue_size: 1 } priority_queue_policy { key: 1 value { max_queue_size: 2 } }"
    busy.model("m", "busy", batching(f"{THREE_LEVELS} {policies}"))
    with serving(busy, "m") as server:
        clients = [send(server, "m", row(), id="first")]
        eventually(lambda: STAGE.events)
        clients += [send(server, "m", row(), priority=level) for level in (1, 1, 2, 3)]
        for level in (1, 2, 3):
            with pytest.raises(TritonError) as caught:
                send(server, "m", row(), id="r", priority=level)
            assert caught.value.status == "Unavailable: [request id: r] Exceeds maximum queue size"
        assert server.model_statistics("m")[0].inference_stats.fail.count == 0
        STAGE.open("go")
        assert all(client.responses()[0].error is None for client in clients)


def test_an_expired_request_is_answered_while_every_instance_is_busy(busy: Repository) -> None:
    busy.model("m", "busy", batching("default_queue_policy { allow_timeout_override: true }"))
    with serving(busy, "m") as server:
        first = send(server, "m", row(), id="first")
        eventually(lambda: STAGE.events)
        patient = send(server, "m", row(), id="patient", timeout_us=FOREVER)
        late = [send(server, "m", row(), timeout_us=timeout_us) for timeout_us in (30_000, 1, 10_000)]
        for client in late:
            assert client.error().status == "Unavailable: Request timeout expired"
        assert STAGE.events == ["first@0"] and version_of(server, "m").statistics.pending_count == 1
        STAGE.open("go")
        assert first.responses()[0].error is None and patient.responses()[0].error is None
        eventually(lambda: len(server._services.timer) <= 1)


def test_a_request_may_only_shorten_its_time(busy: Repository) -> None:
    policy = "default_timeout_microseconds: 20000 allow_timeout_override: true"
    never_late = "priority_queue_policy { key: 1 value {} }"
    busy.model("m", "busy", batching(f"{THREE_LEVELS} {never_late} default_queue_policy {{ {policy} }}"))
    with serving(busy, "m") as server:
        first = send(server, "m", row(), priority=1)
        eventually(lambda: STAGE.events)
        assert send(server, "m", row(), timeout_us=FOREVER).error().message == "Request timeout expired"
        STAGE.open("go")
        first.responses()


def test_delayed_requests_are_served_last_of_their_level(busy: Repository) -> None:
    policy = "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }"
    never_late = "priority_queue_policy { key: 3 value {} } priority_queue_policy { key: 1 value {} }"
    busy.model("m", "busy", batching(f"{THREE_LEVELS} {policy} {never_late}"))
    with serving(busy, "m") as server:
        clients = [send(server, "m", row(), id="first", priority=1)]
        eventually(lambda: STAGE.events)
        clients += [send(server, "m", row(), id=name, priority=2) for name in ("a", "b")]
        clients += [send(server, "m", row(), id="low", priority=3), send(server, "m", row(), id="high", priority=1)]
        STAGE.open("go")
        for client in clients:
            assert client.responses()[0].error is None
        assert STAGE.events == ["first@1", "high@1", "a@2", "b@2", "low@3"]


def test_times_of_centuries_are_fine(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    policy = f"default_queue_policy {{ default_timeout_microseconds: {FOREVER} }}"
    fields = f"preferred_batch_size: [ 2 ] max_queue_delay_microseconds: {FOREVER} {policy}"
    repository.model("m", "echo", batching(fields, max_batch_size=2))
    with serving(repository, "m") as server:
        clients = [send(server, "m", row()) for _ in range(4)]
        assert [client.responses()[0].parameters["batch"] for client in clients] == [2] * 4


def test_a_deep_queue_is_cancelled_request_by_request(busy: Repository) -> None:
    busy.model(
        "m", "busy", batching(f"{THREE_LEVELS} default_queue_policy {{ default_timeout_microseconds: {FOREVER} }}")
    )
    with serving(busy, "m") as server:
        first = send(server, "m", row())
        eventually(lambda: STAGE.events)
        clients = [send(server, "m", row(), id=str(index), priority=index % 5) for index in range(4096)]
        for client in reversed(clients):
            client.cancel()
            assert client.error().code is ErrorCode.CANCELLED
        STAGE.open("go")
        first.responses()
        assert len(STAGE.events) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ("priority_levels: 3", "default priority level must be in range [1, 3] for m"),
        ("priority_levels: 3 default_priority_level: 4", "default priority level must be in range [1, 3] for m"),
        (
            "priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 4 value {} }",
            "priority queue policy must have priority level in range [1, 3] for m",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 preserve_ordering: true",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
    ],
)
def test_rules_of_a_configuration(busy: Repository, caplog: pytest.LogCaptureFixture, fields: str, text: str) -> None:
    busy.model("m", "busy", batching(fields))
    with serving(busy) as server, pytest.raises(TritonError, match="failed to poll"):
        server.load_model("m")
    assert text in caplog.text


def test_as_many_levels_as_a_number_can_hold(busy: Repository, caplog: pytest.LogCaptureFixture) -> None:
    busy.model("m", "busy", batching(f"priority_levels: {FOREVER} default_priority_level: 1"))
    STAGE.open("go")
    with serving(busy, "m") as server:
        for level in (FOREVER, 0, 2**40):
            send(server, "m", row(), id="r", priority=level).responses()
    assert STAGE.events == [f"r@{FOREVER}", "r@1", f"r@{2**40}"] and "not supported" not in caplog.text


# --- the queue by itself, against a plain list ----------------------------------------------------------------------


@dataclass
class Owner:
    name: str = "m"
    version: int = 1
    reaper: Reaper = field(default_factory=Reaper)
    statistics: Statistics = field(default_factory=Statistics)
    may_block_in_send: bool = False

    def request_done(self, channel: ResponseChannel) -> None:
        pass


def make_request(priority: int, timeout_us: int, queued_ns: int) -> QueuedRequest:
    message = InferenceRequest("m", priority=priority, timeout_us=timeout_us)
    request = QueuedRequest(message, ValidRequest({}, (), 0), ResponseChannel(message, Client(), Owner()))
    request.queue_start_ns = queued_ns
    return request


POLICIES = QueuePolicies(
    default=QueuePolicy(allow_timeout_override=True),
    levels=3,
    default_level=2,
    by_level={
        1: QueuePolicy(max_queue_size=3, timeout_us=5, reject=False),
        3: QueuePolicy(timeout_us=9, allow_timeout_override=True),
    },
)
ADD = st.tuples(st.just("add"), st.integers(1, 3), st.integers(0, 12))
OPERATIONS = st.lists(
    st.one_of(ADD, ADD, st.tuples(st.sampled_from(["pop", "remove", "tick"]), st.integers(0, 7), st.just(0))),
    max_size=60,
)


def deadline_ns(request: QueuedRequest) -> int:
    return POLICIES.policy(request.priority).deadline_ns(request.queue_start_ns, request.timeout_us)


@given(OPERATIONS)
def test_the_queue_does_what_a_list_would(operations: list[tuple[str, int, int]]) -> None:
    queue = PriorityQueue(POLICIES)
    waiting: list[QueuedRequest] = []  # by arrival
    delayed: list[QueuedRequest] = []  # by the time it was delayed
    made: list[QueuedRequest] = []
    now_ns = 0
    for operation, number, timeout_us in operations:
        if operation == "add":
            request = make_request(number, timeout_us, now_ns)
            made.append(request)
            size = sum(other.priority == number for other in waiting + delayed)
            if number == 1 and size >= 3:
                with pytest.raises(TritonError):
                    queue.enqueue(request)
            else:
                queue.enqueue(request)
                waiting.append(request)
        elif operation == "tick":
            now_ns += number * 1000
            due = [one for one in waiting if 0 < deadline_ns(one) <= now_ns]
            due.sort(key=deadline_ns)
            waiting = [one for one in waiting if one not in due]
            delayed += [one for one in due if one.priority == 1]
            assert queue.take_expired(now_ns) == [one for one in due if one.priority != 1]
        elif operation == "remove" and made:
            request = made[number % len(made)]
            assert queue.remove(request) == (request in waiting + delayed)
            waiting = [one for one in waiting if one is not request]
            delayed = [one for one in delayed if one is not request]
        expected = sorted(waiting + delayed, key=lambda one: (one.priority, one in delayed))
        if operation == "pop" and expected:
            request = expected.pop(0)
            assert queue.pop_first() is request
            (waiting if request in waiting else delayed).remove(request)
        assert list(queue) == expected and len(queue) == len(expected)
        deadlines = [deadline_ns(one) for one in waiting if deadline_ns(one)]
        assert queue.next_deadline_ns() == min(deadlines, default=None)
    for request in made:
        request.release()


def test_the_queue_forgets_a_request_that_has_left() -> None:
    queue = PriorityQueue(POLICIES)
    for leave in (lambda one: queue.pop_first(), queue.remove, lambda one: queue.take_expired(10**9)):
        request = make_request(3, 1, 0)
        queue.enqueue(request)
        leave(request)
        request.release()
        reference = weakref.ref(request)
        del request
        gc.collect()
        assert reference() is None and len(queue) == 0


# --- the timer ------------------------------------------------------------------------------------------------------


@pytest.fixture
def timer() -> Timer:
    return Timer()


def test_alarms_ring_in_order_of_their_times(timer: Timer) -> None:
    rung: list[str] = []
    done = threading.Event()
    alarms = {name: (lambda name=name: rung.append(name)) for name in "abcd"}
    now_ns = time.monotonic_ns()
    for delay_ms, name in ((30, "c"), (5, "a"), (20, "b"), (10, "d")):
        timer.set(alarms[name], now_ns + delay_ms * 1_000_000)
    timer.set(alarms["c"], now_ns + 1_000_000)  # moved
    timer.clear(alarms["d"])
    timer.set(done.set, now_ns + 40_000_000)
    timer.start()
    assert done.wait(20) and rung == ["c", "a", "b"] and len(timer) == 0
    timer.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "timer"]


def test_a_timer_that_several_threads_start_has_one_thread(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    barrier = threading.Barrier(4)

    class SlowThread(threading.Thread):
        """The others have their turn before it exists."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            time.sleep(0.05)
            super().__init__(*arguments, **options)
            started.append(self)

    def start() -> None:
        barrier.wait()
        timer.start()

    threads = [threading.Thread(target=start) for _ in range(4)]
    monkeypatch.setattr("llmbackend.waiting.timer.threading.Thread", SlowThread)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timer.stop()
    assert len(started) == 1 and not started[0].is_alive()


def test_an_alarm_that_fails_does_not_end_the_timer(timer: Timer, caplog: pytest.LogCaptureFixture) -> None:
    timer.start()
    done = threading.Event()
    timer.set(lambda: 1 / 0, 0)  # type: ignore[arg-type]
    timer.set(done.set, time.monotonic_ns() + 1)
    assert done.wait(20) and "an alarm failed" in caplog.text
    timer.set(lambda: None, 2**80)
    timer.stop()
