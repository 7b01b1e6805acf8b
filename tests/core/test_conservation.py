"""What requests leave behind: nothing; and what would be left is noticed, in words, once."""

from __future__ import annotations

import random

import pytest

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import TritonError
from llmbackend.frontends.operations.probes import render
from tests.helpers.core_host import (
    ECHO_BACKEND,
    KEEPING_BACKEND,
    STAGE,
    Client,
    Repository,
    send,
    serving,
    version_of,
    x,
)
from tests.helpers.waiting import eventually

METRIC = 'llmbackend:core_invariant_breaches_total{model="m",version="1"}'


def test_a_breach_is_logged_and_counted_once(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m") as server:
        model = version_of(server, "m")
        model.statistics.add_pending(2)
        for _ in range(3):
            send(server, "m").responses()
        text = "model 'm' version 1 is idle, but has 2 requests pending in its statistics"
        eventually(lambda: server.check() == [text])
        assert caplog.text.count(f"invariant violated: {text}") == 1
        assert f"{METRIC} 1" in render(server.metrics_registry).decode()
        model.statistics.add_pending(-2)


def test_a_running_request_is_no_breach_but_not_idle(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep")
    with serving(repository, "m") as server:
        client = send(server, "m", id="a")
        STAGE.wait("executed a")
        with pytest.raises(TritonError):
            send(server, "m", x(1), x(2))  # refused: counts for a moment
        assert server.check() == [
            "model 'm' version 1 is idle, but has 1 in-flight inferences",
            "model 'm' version 1 is idle, but has 1 requests in its registry",
            "model 'm' version 1 is idle, but has 1 request ids in its registry",
        ]
        server.unload_model("m")
        assert "the server is idle, but has 1 model versions that drain" in server.check()
        _, request = STAGE.kept.pop()
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
        client.responses()
    assert "invariant breached" not in caplog.text


# Ends requests in every way a backend can, and loses some.
UNRULY_BACKEND = """
from llmbackend.core.backend_api import ResponseFlag, internal

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        way = request.parameters["way"]
        if way == "raise":
            raise internal("no")
        if way == "lose":
            continue
        if way == "twice":
            request.new_response().send(ResponseFlag.FINAL)
        if way == "factory":
            factory = request.response_factory()
            request.release()
            factory.send_flags(ResponseFlag.FINAL)
            factory.close()
            continue
        if way != "silent":
            request.new_response().send(ResponseFlag.FINAL)
        request.release()
"""
WAYS = ("raise", "lose", "twice", "factory", "silent", "well")


def test_nothing_is_left_after_any_mixture(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    repository.backend("b", UNRULY_BACKEND)
    policy = "default_queue_policy { allow_timeout_override: true max_queue_size: 50 }"
    repository.model("m", "b", f"dynamic_batching {{ {policy} }} instance_group {{ count: 2 }}")
    choose = random.Random(5)
    with serving(repository, "m") as server:
        clients: list[Client] = []
        for _ in range(400):
            parameters = {"way": choose.choice(WAYS)}
            try:
                client = send(
                    server,
                    "m",
                    x(1),
                    id=choose.choice("abc"),
                    timeout_us=choose.choice((0, 1, 500)),
                    parameters=parameters,
                )
            except TritonError as error:
                assert "Exceeds maximum queue size" in error.message
                continue
            clients.append(client)
            if choose.random() < 0.1:
                server.cancel_requests("m", -1, choose.choice("abc"))
            if choose.random() < 0.02:
                (repository.models / "m" / "1" / "touched").write_text(str(len(clients)))
                server.load_model("m")
        for client in clients:
            client.responses()
            assert client.events.empty()
        assert len(clients) > 100
    assert "invariant breached" not in caplog.text
