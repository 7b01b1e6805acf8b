"""Resources and priorities of instances across models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelRateLimiter

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.scheduling.rate_limiter import (
    EVERY_DEVICE,
    GLOBAL,
    RateLimiter,
    RateLimitResource,
    ResourceManager,
)
from llmbackend.core.tensors import Tensor
from tests.helpers.core_host import ECHO_BACKEND, STAGE, WAIT_S, Client, Repository, send, serving
from tests.helpers.waiting import eventually

# Notes "<model> <id>", and executes until the test opens that gate.
STEPPED_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        event = instance.model.name + " " + request.id
        STAGE.note(event)
        if request.id:
            STAGE.wait(event)
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
"""
NEEDS = """instance_group {{ count: {count} rate_limiter {{
    resources [ {{ name: "{name}" count: {amount} {scope} }} ] priority: {priority} }} }}"""
ON = {"rate_limit": "execution_count"}


def needs(name: str = "R", amount: int = 1, count: int = 1, priority: int = 1, scope: str = "") -> str:
    return NEEDS.format(name=name, amount=amount, count=count, priority=priority, scope=scope)


@pytest.fixture
def stepped(repository: Repository) -> Repository:
    repository.backend("stepped", STEPPED_BACKEND)
    return repository


def stays(condition: Callable[[], object]) -> None:
    """Holds, and still holds when something that should not happen has had time to."""
    eventually(condition)
    time.sleep(0.05)
    assert condition()


def finish(name: str, client: Client) -> None:
    STAGE.open(name)
    assert client.responses()[0].error is None


def test_instances_of_two_models_share_one_resource(stepped: Repository) -> None:
    for name in ("a", "b"):
        stepped.model(name, "stepped", needs())
    with serving(stepped, "a", "b", **ON) as server:
        first = send(server, "a", id="1")
        eventually(lambda: STAGE.events == ["a 1"])
        second = send(server, "b", id="1")
        stays(lambda: STAGE.events == ["a 1"])
        assert server.model_statistics("b")[0].inference_stats.success.count == 0
        finish("a 1", first)
        eventually(lambda: STAGE.events == ["a 1", "b 1"])
        finish("b 1", second)


def test_off_means_that_instances_wait_for_nothing(stepped: Repository) -> None:
    for name in ("a", "b"):
        stepped.model(name, "stepped", needs())
    with serving(stepped, "a", "b", rate_limit_resources=[RateLimitResource("R", 0)]) as server:
        clients = {f"{name} 1": send(server, name, id="1") for name in ("a", "b")}
        eventually(lambda: sorted(STAGE.events) == ["a 1", "b 1"])
        for name, client in clients.items():
            finish(name, client)


def test_as_many_execute_at_once_as_the_command_line_grants(stepped: Repository) -> None:
    stepped.model("m", "stepped", needs(count=4, amount=2))
    with serving(stepped, "m", **ON, rate_limit_resources=[RateLimitResource("R", 5)]) as server:
        clients = {f"m {index}": send(server, "m", id=str(index)) for index in range(4)}
        eventually(lambda: len(STAGE.events) == 2)
        stays(lambda: len(STAGE.events) == 2)
        for name, client in clients.items():
            finish(name, client)


def test_a_request_that_waits_for_resources_can_be_cancelled(stepped: Repository) -> None:
    for name in ("a", "b"):
        stepped.model(name, "stepped", needs())
    with serving(stepped, "a", "b", **ON) as server:
        first = send(server, "a", id="1")
        eventually(lambda: STAGE.events)
        waiting = send(server, "b", id="1")
        waiting.cancel()
        assert waiting.error().status == "Cancelled: Request cancelled"
        finish("a 1", first)
        last = send(server, "a", id="2")
        finish("a 2", last)
        assert STAGE.events == ["a 1", "a 2"]


def test_a_batch_grows_while_its_instance_waits_for_resources(stepped: Repository) -> None:
    stepped.backend("echo", ECHO_BACKEND)
    stepped.model("a", "stepped", needs())
    stepped.model("b", "echo", "max_batch_size: 4\ndynamic_batching {}\n" + needs())
    with serving(stepped, "a", "b", **ON) as server:
        first = send(server, "a", id="1")
        eventually(lambda: STAGE.events)
        row = Tensor.of("X", np.zeros((1, 2), np.float32))
        rows = [send(server, "b", row) for _ in range(3)]
        finish("a 1", first)
        assert [client.responses()[0].parameters["batch"] for client in rows] == [3, 3, 3]


def test_models_with_sequences_wait_for_resources_too(stepped: Repository) -> None:
    for name in ("a", "b"):
        stepped.model(name, "stepped", "sequence_batching {}\n" + needs())
    sequence = {"correlation_id": 1, "flags": RequestFlag.SEQUENCE_START | RequestFlag.SEQUENCE_END}
    with serving(stepped, "a", "b", **ON) as server:
        first = send(server, "a", id="1", **sequence)
        eventually(lambda: STAGE.events == ["a 1"])
        second = send(server, "b", id="1", **sequence)
        stays(lambda: STAGE.events == ["a 1"])
        finish("a 1", first)
        finish("b 1", second)


@pytest.mark.parametrize(
    ("given_resources", "config", "message"),
    [
        (
            [RateLimitResource("R", 3)],
            needs(amount=4),
            'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 4",
        ),
        (
            [RateLimitResource("other", 9)],
            needs(amount=1, scope="global: true"),
            'Resource count for "R" is limited to 0 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 1",
        ),
        (
            [],
            needs() + needs(scope="global: true"),
            'Resource "R" is present as both global and device-specific resource in the model configuration.',
        ),
    ],
)
def test_a_load_that_asks_for_more_than_there_is_fails_in_tritons_words(
    stepped: Repository, given_resources: list[RateLimitResource], config: str, message: str
) -> None:
    stepped.model("m", "stepped", config)
    stepped.model("fine", "stepped")
    with serving(stepped, **ON, rate_limit_resources=given_resources) as server:
        with pytest.raises(TritonError) as caught:
            server.load_model("m")
        assert caught.value.message == (
            f"load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: {message};\n"
        )
        server.load_model("fine")  # and nothing of the other is left


def test_unloading_gives_a_model_back_what_it_needed(stepped: Repository) -> None:
    stepped.model("large", "stepped", needs(amount=8))
    stepped.model("small", "stepped", needs(amount=1, count=2))
    with serving(stepped, "large", "small", **ON) as server:
        clients = {f"small {index}": send(server, "small", id=str(index)) for index in range(2)}
        eventually(lambda: len(STAGE.events) == 2)  # there are 8
        for name, client in clients.items():
            finish(name, client)
        server.unload_model("large")
        eventually(
            lambda: not server.model_is_ready("large") and len(server._services.rate_limiter._registrations) == 2
        )
        STAGE.clear()
        clients = {f"small {index}": send(server, "small", id=str(index)) for index in range(2)}
        eventually(lambda: STAGE.events)
        stays(lambda: len(STAGE.events) == 1)  # there is 1
        for name, client in clients.items():
            finish(name, client)


def test_a_model_whose_instance_waits_for_resources_unloads(stepped: Repository) -> None:
    for name in ("a", "b"):
        stepped.model(name, "stepped", needs())
    with serving(stepped, "a", "b", **ON) as server:
        first = send(server, "a", id="1")
        eventually(lambda: STAGE.events)
        waiting = send(server, "b", id="1")
        eventually(lambda: server._services.rate_limiter._waiting)
        waiting.cancel()
        assert waiting.error().status == "Cancelled: Request cancelled"
        server.unload_model("b")
        eventually(lambda: [row.reason for row in server.repository_index() if row.name == "b"] == ["unloaded"])
        finish("a 1", first)


# --- the limiter itself ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Instance:
    rate_limiter: ModelRateLimiter = field(default_factory=ModelRateLimiter)
    device_id: int = 0


def instance(amount: int = 1, priority: int = 0, device: int = 0) -> Instance:
    config = ModelRateLimiter(priority=priority)
    config.resources.add(name="R", count=amount)
    return Instance(config, device)


def test_an_instance_of_priority_2_executes_half_as_often_as_one_of_priority_1() -> None:
    limiter = RateLimiter("execution_count")
    instances = {"often": instance(priority=1), "seldom": instance(priority=2)}
    for each in instances.values():
        limiter.register(each)
    order: list[str] = []

    def work(name: str) -> None:
        while (lease := limiter.acquire(instances[name])) is not None:
            order.append(name)
            if len(order) == 60:
                for each in instances.values():
                    limiter.unregister(each)
            else:
                eventually(lambda: limiter._waiting)  # the other wants the next turn, too
            limiter.release(lease, has_executed=True)

    threads = [threading.Thread(target=work, args=(name,)) for name in instances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert 39 <= order.count("often") <= 41 and len(order) == 60


def test_an_instance_that_needs_much_is_not_passed_by_those_that_need_little() -> None:
    limiter = RateLimiter("execution_count", [RateLimitResource("R", 4)])
    large, small, later = instance(4), instance(1), instance(1)
    for each in (large, small, later):
        limiter.register(each)
    lease = limiter.acquire(small)
    assert lease is not None
    order: list[str] = []

    def take(name: str, who: Instance) -> None:
        taken = limiter.acquire(who)
        assert taken is not None
        order.append(name)
        limiter.release(taken, has_executed=True)

    threads = [
        threading.Thread(target=take, args=("large", large)),
        threading.Thread(target=take, args=("later", later)),
    ]

    def is_waiting(count: int) -> bool:
        return len(limiter._waiting) == count

    for index, thread in enumerate(threads):
        thread.start()
        eventually(partial(is_waiting, index + 1))
    limiter.release(lease, has_executed=True)
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["large", "later"]


def test_an_instance_that_is_unregistered_while_it_waits_gets_nothing() -> None:
    limiter = RateLimiter("execution_count")
    first, second = instance(), instance()
    for each in (first, second):
        limiter.register(each)
    lease = limiter.acquire(first)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(limiter.acquire(second)))
    thread.start()
    eventually(lambda: limiter._waiting)
    limiter.unregister(second)
    thread.join(WAIT_S)
    assert found == [None] and lease is not None
    limiter.release(lease, has_executed=True)
    assert limiter.leaked_resources() == {"rate limiter resources in use": 0}


@given(
    given_counts=st.dictionaries(st.sampled_from([EVERY_DEVICE, 0, 1]), st.integers(0, 5), min_size=1),
    device=st.sampled_from([0, 1, GLOBAL]),
    need=st.integers(1, 5),
)
def test_a_grant_counts_for_its_device_for_every_device_or_for_the_host(
    given_counts: dict[int, int], device: int, need: int
) -> None:
    resources = ResourceManager([RateLimitResource("R", count, where) for where, count in given_counts.items()])
    devices = list(given_counts) if device == GLOBAL else [device, EVERY_DEVICE]
    there_is = max((given_counts.get(where, 0) for where in devices), default=0)
    if there_is < need:
        with pytest.raises(TritonError, match=f"is limited to {there_is} "):
            resources.register("user", {(device, "R"): need})
        return
    resources.register("user", {(device, "R"): need})
    taken = 0
    while resources.fits({(device, "R"): need}):
        resources.take({(device, "R"): need})
        taken += need
    assert taken <= there_is < taken + need


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_sequences_that_wait_for_resources_can_still_be_cancelled_and_joined(
    stepped: Repository, strategy: str
) -> None:
    stepped.model("a", "stepped", needs())
    idle = "max_sequence_idle_microseconds: 100000"
    stepped.model("m", "stepped", f"max_batch_size: 4 sequence_batching {{ {idle} {strategy} }} {needs()}")
    with serving(stepped, "a", "m", **ON) as server:
        first = send(server, "a", id="1")
        eventually(lambda: STAGE.events == ["a 1"])
        row = Tensor.of("X", np.zeros((1, 2), np.float32))
        both = RequestFlag.SEQUENCE_START | RequestFlag.SEQUENCE_END
        clients = {
            f"m {number}": send(server, "m", row, id=str(number), correlation_id=number, flags=both)
            for number in (1, 2, 3)
        }
        stays(lambda: STAGE.events == ["a 1"])
        gone = clients.pop("m 2")
        gone.cancel()
        assert gone.error().code is ErrorCode.CANCELLED
        finish("a 1", first)
        for name, client in clients.items():
            finish(name, client)
        assert [event for event in STAGE.events if event != "m "] == ["a 1", "m 1", "m 3"]
